"""The options of each command, with their help, defaults and types; and what the command line says."""

import argparse
from typing import Any, Literal, TypeAlias

Arguments: TypeAlias = dict[str, tuple[str, dict[str, Any]]]  # help, settings of `argparse` by name
MAX_HOURS = 24 * 365
TUNNELS = ("ngrok", "cloudflared")
SIZES = ("tiny", "base", "large", "xlarge")
ABOUT = "Train one large model together with others."
START = """three to start with:
  colab-swarm demo                  see four peers train here, in 2 minutes
  colab-swarm create my-run         start a run; it prints the invitation
  colab-swarm join 'swarm://…'    train the recipe's ALBERT in a run with its invitation
'colab-swarm COMMAND --help' shows a command's options and examples."""
ALBERT_ONLY = (
    "This command trains the recipe's ALBERT only. Where the run trains another model, use cs.join(…) in Python, "
    "or help its trainers with --reduce-only"
)
NEXT = """Next: colab-swarm create my-run         start your own run and send its invitation to a friend,
      colab-swarm join 'swarm://…'    who trains ALBERT with you. Your own model: cs.create(…) in Python"""


def number_or_auto(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


def grid(text: str) -> list[int]:
    return [int(side) for side in text.split("x")]


def hours(text: str) -> float:
    number = float(text)
    if not 0 < number <= MAX_HOURS:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and at most {MAX_HOURS}")
    return number


FLAG: dict[str, Any] = {"action": "store_true"}
FLOAT: dict[str, Any] = {"type": float}
INT: dict[str, Any] = {"type": int}
HOURS: dict[str, Any] = {"type": hours}
TEXT: dict[str, Any] = {"default": ""}
SEVERAL: dict[str, Any] = {"action": "append", "default": []}
INVITE: Arguments = {"invite": ("invitation: the line that swarm.invite() gives", {})}
TOKEN: Arguments = {
    "--send-hf-token": ("send your Hugging Face token, HF_TOKEN, to the organizer of an allowlist run", FLAG),
}
LEAVE: Arguments = {"--hours": ("leave after this many hours", HOURS)}
COMMON: Arguments = {
    "--accept-terms": ("confirm that Colab's terms allow this", FLAG),
    "--accept-tunnels": (
        "confirm that the platform's terms allow tunnels and relays, on Colab with paid compute units",
        {"action": "store_const", "const": "tunnels", "dest": "accept_terms"},
    ),
    "--json-lines": ("print one JSON object per event", FLAG),
}
NAME: Arguments = {"--peer-name": ("name shown to others", TEXT)}
NETWORK: Arguments = {
    "--port": ("port to listen on; 0: a free one", INT | {"default": 0}),
    "--announce": ("address to give to others, ws://HOST:PORT", SEVERAL),
    "--identity": ("file with this peer's key", {}),
    "--no-listen": ("only dial out", FLAG),
    "--relay": ("relay for peers that cannot be dialled; backbones always do", FLAG),
    "--no-relays": ("do not use relays to be reached", FLAG),
    "--no-lan": ("do not announce the run in the local network", FLAG),
    "--tunnel": ("open a public address for this peer", {"choices": TUNNELS}),
    "--upload-mbit-s": ("upload limit, Mbit/s", FLOAT),
    "--download-mbit-s": ("download limit, Mbit/s", FLOAT),
}
PEER: Arguments = {**NAME, **COMMON, **NETWORK}
DEMO: Arguments = {"--steps": ("number of global steps", INT | {"default": 60})}
DOCTOR: Arguments = {
    "invite": ("also check this run", {"nargs": "?"}),
    "--size": ("size of the ALBERT to train", {"choices": SIZES}),
}
MAILBOX: Arguments = {
    "--mailbox": ("confirms the folder, or the store with an endpoint, that the invitation names", TEXT),
}
STATUS: Arguments = {"invite": ("invitation of the run", {"nargs": "?"}), **MAILBOX, **COMMON}
CREATE: Arguments = {
    "run": ("name of the run, or a run.toml with its settings", {}),
    "--hours": ("life of the invitation; default: 24, with --mailbox 720", HOURS),
    "--mailbox": (
        "bucket or shared folder for the rounds, such as s3://bucket/folder: nobody stays online",
        TEXT,
    ),
    "--allow-user": ("Hugging Face user on the run's allowlist; repeatable", SEVERAL),
    "--allow-organisation": ("Hugging Face organisation on the run's allowlist; repeatable", SEVERAL),
    **PEER,
}
RELAY: Arguments = {
    **INVITE,
    **TOKEN,
    "--gb": ("total relay quota, GB", FLOAT),
    "--mbit-s": ("relay rate limit, Mbit/s", FLOAT),
    **PEER,
}
JOIN: Arguments = {
    **INVITE,
    **LEAVE,
    **MAILBOX,
    **TOKEN,
    "--reduce-only": ("help the trainers; needs no GPU, data or torch", FLAG),
    "--size": ("size of the ALBERT", {"default": "tiny", "choices": SIZES}),
    "--text": ("file, Hub data set, or python-docs", {"default": "python-docs"}),
    "--steps": ("leave at this global step; 0: stay", INT | {"default": 0}),
    "--target-batch-size": ("samples per global step, all peers", INT | {"default": 256}),
    "--batch-size": ("samples of one micro-batch", INT | {"default": 16}),
    "--lr": ("LAMB learning rate", FLOAT | {"default": 1e-2}),
    "--compression": ("float16, int8, adaptive, sparseloco, topk:0.01 …", {"default": "float32"}),
    "--overlap": ("compute during an averaging round", FLAG),
    "--local-steps": ("local steps from one round to the next", {"type": int, "default": 1}),
    **PEER,
}
EXPERTS: Arguments = {
    **INVITE,
    **TOKEN,
    "prefix": ("name of the kind of experts, such as ffn", {}),
    "--grid": ("such as 16x16, the same for all peers", {"type": grid, "required": True}),
    "--dim": ("width of the layer", INT | {"required": True}),
    "--hidden": ("width inside an expert; default: 4 x dim", INT),
    "--heads": ("attention heads: host Transformer blocks", INT),
    "--count": ("number of experts; default: as many as fit", INT),
    "--folder": ("folder for saves", {}),
    "--lr": ("Adam learning rate", FLOAT | {"default": 1e-3}),
    **LEAVE,
    **PEER,
}
COORDINATE: Arguments = {
    "job": ("Python file with job = cs.workunits.Job(…)", {}),
    "--folder": ("the job's state, continued if it exists; default: JOB-work", {}),
    "--store": ("SQLite file, redis://…, postgresql+psycopg://… or mysql+pymysql://…", {}),
    "--servers": ("number of parameter servers, or auto", {"type": number_or_auto, "default": "auto"}),
    "--host": ("address to listen on; default: all interfaces", {}),
    "--port": ("port to listen on; default: the last one, or a free one", INT),
    "--url": ("address for volunteers, if a proxy forwards to this one", {}),
    "--tunnel": ("open a public https address", {"choices": TUNNELS}),
    "--open": ("accept volunteers without the link's secret", FLAG),
    **COMMON,
}
VOLUNTEER: Arguments = {
    "link": ("shown by the coordinator", {}),
    "--units": ("work units at a time", INT | {"default": 1}),
    "--name": ("name shown to others", TEXT),
    "--folder": ("folder for data and unfinished units; default: in your home", {}),
    "--device": ("device to train on, such as cuda:1; default: a GPU if there is one", {}),
    "--trust-code": ("run the code that the coordinator sends", FLAG),
    **LEAVE,
    **COMMON,
}
