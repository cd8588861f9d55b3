"""Who may ask what, and how much: API keys, quotas, and the account of what was used."""
