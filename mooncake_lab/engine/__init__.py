"""Real computation with torch: a Llama model that prefills and decodes on this machine."""
