"""What a run measures: names and units, where numbers go, statistics, progress, the picture.

Light to import: neither torch nor matplotlib nor tensorboard until something needs them.
"""
