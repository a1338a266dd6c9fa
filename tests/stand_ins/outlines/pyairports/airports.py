"""See the package."""

AIRPORT_LIST: list = []
