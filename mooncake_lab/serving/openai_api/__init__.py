"""An HTTP API that existing clients speak (OpenAI's completions and chat completions)."""
