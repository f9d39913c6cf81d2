"""Training and generation over several processes that the loops use like one.

    process 0: the run               its loop, trainer and engine do not know the other processes
      |  numbered commands (Ray)
      +--> processes 1 ...: hosts    make the same calls at the same time (`training.fsdp2`)

`team`      collective calls: process 0 has all processes call the same method
`backend`   a trainer whose calls are collective
`engines`   an engine that distributes requests over the engines of all processes
`host`      runs the commands in processes 1 and up
`placement` starts the processes; the only module that imports Ray
"""
