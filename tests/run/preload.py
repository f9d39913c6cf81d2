"""Imported once by the server that children are forked from (`helpers.start`)."""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"

import matplotlib.pyplot  # noqa: F401
import transformers.models.auto.tokenization_auto  # noqa: F401

import slipstream.cli
import slipstream.run.train  # noqa: F401
