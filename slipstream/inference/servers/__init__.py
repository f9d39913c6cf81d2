"""Serving engines: clients of real vLLM servers, which run in processes and environments of their
own.

    engine.py       `ServedEngine`, an `InferenceEngine` over several servers
    vllm.py         vLLM's HTTP routes
    http.py         JSON over HTTP, and its errors
    process.py      starts, watches and ends a server
    guard.py        a small process that ends a server when its run ends, however it ends
    weights.py      the model folder in memory from which servers load weights
    drafts.py       draft heads: their folder, updates, the check, counters and alarms
    vllm_worker.py  runs inside vLLM; imports nothing of Slipstream
"""
