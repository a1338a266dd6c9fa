"""The V0 commands of the fixtures, held against the real vLLM 0.6.4.post1 with our plugin: they are what V0 runs."""

from __future__ import annotations

import re

import pytest

from mooncake_v0.migrate.convert import V1Instance
from tests.migrate.deployments import NEWEST, instances
from tests.migrate.v0_parser import V0Parser

pytestmark = pytest.mark.pin

# V0 refuses these: flags of later versions, JSON that lost its quotes, the V1 keys of a V1 deployment
REFUSED = re.compile(
    r"data-parallel/|mangled-quoting/|typographic-quotes/|heredocs/decode|ssh-and-tmux/prefill|already-v1/|hostile/|other-connector/|store-connector/"
)
# V0 parses these, our connector refuses the combination later or the flag never reached it
ALL = instances(NEWEST)
ACCEPTED = [(name, item) for name, item in ALL if not REFUSED.match(name)]
NOT_ACCEPTED = [(name, item) for name, item in ALL if re.match(r"data-parallel/|mangled-quoting/|already-v1/", name)]


def words(item: V1Instance) -> list[str]:
    arguments = item.original.arguments
    given = [] if arguments.has("--model") else ["--model", arguments.model]
    flags = [word for flag in arguments.flags for word in [flag.name, *flag.values]]
    return [re.sub(r"\$\{\w+\}", "1", word) for word in [*given, *flags]]


def test_the_pin_is_the_real_one(v0_parser: V0Parser) -> None:
    assert v0_parser.version.startswith("0.6.4.post1")


@pytest.mark.parametrize("item", [item for _, item in ACCEPTED], ids=[name for name, _ in ACCEPTED])
def test_v0_command_is_accepted_with_our_plugin(v0_parser: V0Parser, item: V1Instance) -> None:
    answer = v0_parser.parse(words(item))
    assert answer["ok"], answer["error"]
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    assert answer["kv_role"] == roles.get(item.role)


@pytest.mark.parametrize("item", [item for _, item in NOT_ACCEPTED], ids=[name for name, _ in NOT_ACCEPTED])
def test_what_v0_cannot_have_run_is_refused(v0_parser: V0Parser, item: V1Instance) -> None:
    assert not v0_parser.parse(words(item))["ok"]
