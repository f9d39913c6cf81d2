"""A server that answers as vLLM 0.32 does, with Slipstream's engine behind it.

    entrypoints/openai/api_server.py    command line and HTTP routes
    sampling.py                         checks of requests
    core.py                             the engine in a thread, and the worker
    drafts.py                           the draft head, and its counters
    faults.py                           faults that a test plants with POST /test/plant

Only servers that tests start have this folder on their PYTHONPATH. What vLLM's documents leave open
was read off a real server: see the docstrings.
"""
