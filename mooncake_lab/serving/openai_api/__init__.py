"""The front door: an HTTP API that existing clients speak (OpenAI's completions and chat completions)."""
