"""The command line of `python -m jaxtp.explain`, and what it names."""

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from jaxtp.config import ConfigError, Switch, load_yaml, nearest_file
from jaxtp.mesh import TP, parse_mesh, request_virtual_devices
