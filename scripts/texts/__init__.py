"""How scripts/fetch_texts.py makes texts and prompts of what registry packages carry."""
