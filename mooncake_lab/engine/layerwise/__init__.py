"""Layer-wise prefill: KVCache is loaded and stored while other layers compute (arXiv §5.2, FAST'25 §3).

`prefill.LayerwisePrefill` joins a `PrefillEngine` and a `TieredStore`; `loader.LayerLoader` takes any source.
"""
