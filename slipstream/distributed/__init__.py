"""Several processes that train and generate as one.

    process 0: the run               its loop, trainer and engine know nothing of the others
      |  orders (Ray), by number
      +--> processes 1 ...: hosts    do what the first one does, at the same time: `training.fsdp2`

`team`      what the first process knows of the others, and how it takes them along
`backend`   the trainer whose every call the others make, too
`engines`   all engines as one
`host`      what another process does
`placement` where they run: the only module that imports Ray
"""
