"""`python -m tests.migrate.golden` writes the golden reports anew, to be read in the diff."""

from __future__ import annotations

from pathlib import Path

from mooncake_v0.migrate.render import render
from tests.migrate.deployments import NAMES, migration

GOLDEN = Path(__file__).parent / "golden"
# (fixture, form of the report); text is the form that a diff shows best
REPORTS = [(name, "text") for name in NAMES] + [
    (name, form) for name in ("documented-shell", "hostile", "two-pairs") for form in ("md", "html", "json")
]


def path_of(name: str, form: str) -> Path:
    return GOLDEN / f"{name}.{'txt' if form == 'text' else form}"


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    wanted = {path_of(name, form) for name, form in REPORTS}
    for path in set(GOLDEN.iterdir()) - wanted:
        path.unlink()
    for name, form in REPORTS:
        path_of(name, form).write_text(render(migration(name).report, form), encoding="utf-8")


if __name__ == "__main__":
    main()
