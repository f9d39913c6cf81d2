"""A server that answers as SGLang 0.5.23 does, with Slipstream's engine behind it.

    launch_server.py    command line and HTTP routes
    manager.py          requests on their way to the engine: pauses, aborts, updates
    sampling.py         checks of requests
    core.py             log-probs of the engine, which is that of the contract server of vLLM

What it does was read in SGLang's source. No real SGLang was at hand: it needs a GPU.
"""
