"""An HTTP API that existing clients speak (OpenAI's completions and chat completions)."""

from mooncake_lab.core.extras import need

need("serve")
