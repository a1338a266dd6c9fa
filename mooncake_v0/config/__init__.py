"""mooncake.json: from bytes to findings (`load`, `rules`) and to a frozen model (`model`)."""
