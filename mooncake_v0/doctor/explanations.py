"""What `mooncake-v0 explain` prints about doctor's checks, about what `metadata check` finds, and about `launch`."""

from __future__ import annotations

from mooncake_v0.config.explanations import Explanation
from mooncake_v0.doctor.catalogue import CHECKS
from mooncake_v0.errors import ERROR, INFO, WARNING

METADATA: tuple[tuple[str, str, str], ...] = (
    (
        "metadata-stale-segment",
        WARNING,
        "The keys of an instance whose process is gone: nobody listens at its port, and no fresh record says otherwise."
        "\n\nNothing in the engine expires, and a killed process leaves its keys. `mooncake-v0 metadata prune` removes them.",
    ),
    (
        "metadata-corrupt-value",
        ERROR,
        "A value that is not a JSON object. The engine refuses the whole segment, so no peer can connect to it.",
    ),
    (
        "metadata-half-published",
        ERROR,
        "One of the engine's two keys of a segment is missing, so that first contact of a peer fails (return code -1).",
    ),
    (
        "metadata-address-differs",
        WARNING,
        "An engine advertises another address than its name: the first network interface and a random port.\n\n"
        "That is the engine's default without MC_LEGACY_RPC_PORT_BINDING=1, and a restarted peer then stays unreachable.",
    ),
    (
        "metadata-loopback-published",
        INFO,
        "An engine advertises a loopback address, which only its own host can reach. Right for a pair on one host.",
    ),
    (
        "metadata-devices-empty",
        ERROR,
        "A segment speaks rdma but names no device: the engine started all the same, and every transfer will fail.",
    ),
    (
        "metadata-no-buffers",
        WARNING,
        "A segment has no buffer yet. It is that way for a moment at every start; if it stays, the start has failed.",
    ),
    (
        "metadata-empty-buffer",
        ERROR,
        "One of a segment's buffers has address or length 0, for which new peers refuse the whole segment.",
    ),
    (
        "metadata-mixed-protocols",
        ERROR,
        "Living segments speak tcp and rdma. Two peers with different protocols cannot exchange data.",
    ),
    (
        "metadata-several-deployments",
        INFO,
        "Agents with different mooncake.json files share one store, whose keys have no prefix for each deployment.\n\n"
        "It works as long as no two of them have the same address.",
    ),
    (
        "metadata-rank-twice",
        ERROR,
        "Two living instances say that they are the same side and rank of one deployment. Peers reach either of them.",
    ),
)
LAUNCH: tuple[tuple[str, str, str], ...] = (
    (
        "launch-api-port-busy",
        ERROR,
        "Something already listens at the port that `mooncake-v0 launch` would give to vLLM's API.",
    ),
)


def doctor_explanations() -> list[Explanation]:
    """Every check of doctor's own in the order of checking, then the store's findings and launch's."""
    checks = [Explanation(item.name, item.severity, item.explanation, "The host (doctor)") for item in CHECKS.values()]
    store = [Explanation(*item, "The metadata store (metadata check, doctor)") for item in METADATA]
    return [*checks, *store, *(Explanation(*item, "Launch commands") for item in LAUNCH)]
