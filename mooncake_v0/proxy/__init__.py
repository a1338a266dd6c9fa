"""The proxy in front of pairs. Read in this order:

settings · prefill_request and prefill_checks (what prefill is sent) · pairs and balancer (where a request goes) · relay,
attempt and passing (its way) · failures (what goes wrong) · guard (deadlines) · health · core (the whole) · app, admin,
server (its faces).
"""
