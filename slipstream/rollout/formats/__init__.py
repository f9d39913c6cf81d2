"""Call formats: how models of different families write tool calls as text."""
