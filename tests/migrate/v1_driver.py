"""Runs inside the environment of `v1_wheel`: answers requests, one JSON object a line, with the real vLLM 0.33.0 code.

{"argv": ["serve", ...]} is parsed by the parser of `vllm serve`, checked by validate_parsed_serve_args and made into
EngineArgs; {"kv": "..."} is made into a KVTransferConfig. The answer is {"ok": true, "values": {...}} or {"ok": false,
"error": "..."}.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys


def main(site, wheel):
    sys.path[:0] = [wheel, site]
    # the platform is not what is tested; without a GPU vLLM wants to be told
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    from stand_ins import install

    install(["torch", "transformers", "triton", "vllm.ir"])
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        parser = make_parser()
        print(json.dumps({"ok": True, "version": version(wheel)}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(parser, json.loads(line)), default=repr), file=answers, flush=True)


def version(wheel):
    folder = next(name for name in os.listdir(wheel) if name.endswith(".dist-info"))
    return folder.split("-")[1].removesuffix(".dist")


def make_parser():
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    make_arg_parser(subparsers.add_parser("serve", usage="vllm serve [model_tag] [options]"))
    return parser


def answer(parser, request):
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return {"ok": True, "values": checked(parser, request)}
    except SystemExit:
        return {"ok": False, "error": errors.getvalue()[-2000:]}
    except Exception as error:  # whatever vLLM raises is the answer
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def checked(parser, request):
    if "kv" in request:
        from vllm.config.kv_transfer import KVTransferConfig

        return {"kv_role": KVTransferConfig(**json.loads(request["kv"])).kv_role}
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import validate_parsed_serve_args

    arguments = parser.parse_args(request["argv"])
    validate_parsed_serve_args(arguments)
    AsyncEngineArgs.from_cli_args(arguments)
    return {key: value for key, value in vars(arguments).items()}


main(*sys.argv[1:3])
