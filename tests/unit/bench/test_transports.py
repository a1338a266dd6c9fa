from __future__ import annotations

import pytest

from mooncake_v0.bench import transports
from mooncake_v0.errors import CouldNotCheckError
from mooncake_v0.transfer import agent_settings


def test_the_engine_is_always_available() -> None:
    assert transports.ENGINE in transports.available()


@pytest.mark.parametrize("name", transports.available())
def test_what_is_available_may_be_asked_for(name: str) -> None:
    transports.check_available(name)


def test_a_transport_that_this_installation_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_settings, "TRANSPORTS", ("engine",), raising=False)

    with pytest.raises(CouldNotCheckError, match="'cuda_ipc' is not available in this installation, which has engine"):
        transports.check_available("cuda_ipc")
