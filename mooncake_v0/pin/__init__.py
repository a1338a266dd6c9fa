"""The pinned environment: vLLM 0.6.4.post1 and the engine, with dependency versions they work with today.

`demo` and the tests use it. Nothing else imports it.
"""
