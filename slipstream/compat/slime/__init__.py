"""slime's package `slime`, for custom generate functions written for slime: replace `slime` by
`slipstream.compat.slime`.

`docs/agents.md` lists the differences.
"""
