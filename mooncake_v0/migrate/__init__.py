"""The way from a V0 deployment to vLLM V1: read it as it is, and say what it takes to run it on MooncakeConnector.

Read the code in this order: `records` (what readers hand on), `files` and the readers (`shell`, `docker`, `compose`,
`kubernetes`, `systemd`, `supervisord`, `json_files`, `python_scripts`), `deployment` (instances, pairs), `facts` (what
is known about V1), `convert`, `ports`, `checks`, `rollout`, `report`, `render`, `emit`. Nothing that is read is ever
executed, and no shell expands it.
"""
