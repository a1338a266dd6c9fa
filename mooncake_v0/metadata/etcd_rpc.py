"""etcd3's generated protocol classes, importable beside every protobuf release.

etcd3 0.12 was generated for protobuf 3 and refuses to import on protobuf 4 and newer ("Descriptors cannot be created
directly") unless protobuf's pure-Python implementation is chosen before its first import. That choice is made here, for
this import only. Only `etcd_store` imports this module.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

from mooncake_v0.errors import UnsupportedError

IMPLEMENTATION = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


def load_etcd_rpc() -> Any:
    """The module `etcd3.etcdrpc`. Raises UnsupportedError when it cannot be imported in this process."""
    chosen = os.environ.get(IMPLEMENTATION)
    choose = chosen is None and "google.protobuf" not in sys.modules
    if choose:
        os.environ[IMPLEMENTATION] = "python"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one deprecation warning per message class
            return importlib.import_module("etcd3.etcdrpc")
    except ImportError as error:
        raise UnsupportedError(f"etcd3 is not installed: {error}", fix="pip install etcd3") from error
    except TypeError as error:
        raise UnsupportedError(
            "etcd3 0.12 cannot be imported: another library has loaded protobuf 4 or newer first",
            fix=f"set {IMPLEMENTATION}=python, or install the tested constraints (protobuf 3.20.3)",
        ) from error
    finally:
        if choose:
            del os.environ[IMPLEMENTATION]
