"""Stand-ins for what vLLM imports and its argument parser does not use: torch, kernels, libraries that are not installed.

Runs inside the environment that `v1_wheel` builds, never in the tests' own process. `install` puts two finders on
`sys.meta_path`: one that always stands in for the named modules, one, last, for every other module that is missing. A
stand-in answers any attribute, call and subscription, and tells pydantic that anything is valid for its types.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

# a missing one of these tells vLLM which platform it is on
_PROBES = frozenset(["vllm", "tpu_inference", "libtpu", "amdsmi", "torch_xla", "intel_extension_for_pytorch"])


class _Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Thing()


class Thing(metaclass=_Meta):
    """Stands for any class, function or constant."""

    def __init__(self, *args, **kwargs):
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __call__(self, *args, **kwargs):
        # as a decorator it leaves the function alone
        if len(args) == 1 and callable(args[0]) and not kwargs and not isinstance(args[0], Thing):
            return args[0]
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Thing()

    def __getitem__(self, key):
        return self

    def __iter__(self):
        return iter(())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __add__(self, other):
        return other

    __radd__ = __sub__ = __add__

    def __hash__(self):
        return id(self)

    def __mro_entries__(self, bases):
        return ()

    def __lt__(self, other):
        return False

    __gt__ = __lt__

    def __ge__(self, other):
        return True

    def __bool__(self):
        return False

    def __len__(self):
        return 0

    def __contains__(self, item):
        return False

    def __index__(self):
        return 0


class _Module(types.ModuleType):
    __path__: list = []
    __version__ = "2.14.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Meta(name, (Thing,), {}) if name[:1].isupper() else Thing()
        setattr(self, name, value)
        return value


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


class _Named(importlib.abc.MetaPathFinder):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if any(name == known or name.startswith(known + ".") for known in self.names):
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None


class _Missing(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.stood_in = set()

    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in _PROBES or top in sys.stdlib_module_names or ("." in name and top not in self.stood_in):
            return None
        self.stood_in.add(top)
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)


def install(names):
    """Stand in for these modules, and for whatever else is missing."""
    sys.meta_path.insert(0, _Named(names))
    sys.meta_path.append(_Missing())
