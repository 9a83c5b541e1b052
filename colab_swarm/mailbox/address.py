"""Addresses of buckets and folders: what they may contain, and which addresses a guest must confirm.

A guest is a peer that joins by an invitation. The invitation contains the address, so another person chose the address.
It may lead to files on the guest's machine, or to hosts for which the guest's keys sign requests. Therefore an address
allows only a few options, and no keys. The guest must confirm a folder or an endpoint: it passes the address
itself, as ``cs.join(…, mailbox=ADDRESS)``, or has set ``AWS_ENDPOINT_URL`` to the endpoint. Google's and Azure's stores
have no endpoints except their own.

The path is that of a URL: ``%20`` stands for a space, and ``%25`` for a ``%``.
"""

import os
import re
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from colab_swarm.errors import JoinError, require
from colab_swarm.invite import MAX_MAILBOX

SCHEMES = ("s3://", "gs://", "az://", "file:///", "memory://")
OPTIONS = ("endpoint", "region")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_REGION = re.compile(r"[a-z0-9-]{1,32}")  # the region becomes part of a host's name
_PRINTABLE = re.compile(r"[ -~]*")
_ENDPOINT = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[^@?#]*)?")
_OWN_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Environment variables that name the store to which this user's keys belong."""
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")


def checked_address(address: str) -> str:
    """Return the address; raise ValueError if it is invalid, or has keys or unknown options."""
    require(len(address) <= MAX_MAILBOX, f"a mailbox of {len(address)} characters: at most {MAX_MAILBOX} fit")
    # errors do not repeat the address, because it may contain a key
    require(
        address.startswith(SCHEMES),
        "this is no mailbox: pass an address such as s3://bucket/folder or "
        f"file:///mnt/folder (kinds: {', '.join(SCHEMES)})",
    )
    kind = address.partition(":")[0]
    is_store = kind not in ("file", "memory")
    # checked before `urlsplit`, whose errors repeat the address
    require(
        not is_store or _PRINTABLE.fullmatch(address),
        "a mailbox's address has characters that no store allows",
    )
    where = urlsplit(address)
    require("@" not in where.netloc, f"a mailbox has no keys in its address: set {kind}'s keys as secrets")
    require(
        "%" not in _ESCAPE.sub("", where.path),
        "a '%' in the path of a mailbox's address begins an escape, such as %20 for a space: write %25 for a '%'",
    )
    require(not where.fragment, "a mailbox's address has no '#'")
    options = options_of(address)
    if not is_store:
        require(not options, f"a mailbox {kind}:// has no options, such as ?{next(iter(options), '')}=")
        return address
    require(
        kind == "s3" or "endpoint" not in options,
        f"a mailbox {kind}:// has no endpoint=: your keys for {kind} work at {kind}'s own hosts, which need none",
    )
    require(_BUCKET.fullmatch(where.netloc), f"there is no name of a bucket after {kind}://")
    require(
        _REGION.fullmatch(options.get("region", "none")), "region= of a mailbox is a name such as eu-west-1"
    )
    require(
        _ENDPOINT.fullmatch(options.get("endpoint", "https://none")),
        "endpoint= of a mailbox is the URL of a store, such as https://storage.example.org",
    )
    return address


def options_of(address: str) -> dict[str, str]:
    """Return an address's options; raise ValueError for unknown or repeated options."""
    pairs = parse_qsl(urlsplit(address).query, keep_blank_values=True)
    require(
        {name for name, _ in pairs} <= {*OPTIONS},
        f"a mailbox has no options but {' and '.join(OPTIONS)}. Keys are secrets, never in an address",
    )
    options = dict(pairs)
    require(len(options) == len(pairs), "an option of a mailbox is given twice")
    return options


def folder_at(address: str) -> Path | None:
    """Return the folder of a ``file://`` address; None for other stores.

    Raises ValueError if the folder does not exist, but a folder exists whose name contains the path's escapes, such as
    ``%20``, literally.
    """
    where: SplitResult = urlsplit(checked_address(address))
    if where.scheme != "file":
        return None
    folder = Path(unquote(where.path))
    if "%" in where.path:
        literal = Path(where.path)
        require(
            folder.exists() or not literal.exists(),
            f"{address} stands for the folder {folder}, since %20 in an address is a space. If you mean {literal}, "
            f"write {literal.as_uri()}",
        )
    return folder


def confirmed_address(address: str, named: str) -> str:
    """Return the address that a guest may open, or raise before anything is opened.

    Args:
        address: the address in the invitation.
        named: the address that the guest passed as ``mailbox=``, or "". A folder may have another path here.

    Raises:
        ValueError: an address is not valid, or the guest named another store.
        JoinError: the guest must confirm the address.
    """
    checked_address(address)
    if named:
        both_folders = folder_at(named) is not None and folder_at(address) is not None
        require(
            named == address or both_folders,
            f"mailbox={named!r}, but the invitation's rounds are in {address}: pass that, or leave mailbox= out",
        )
        return named
    reason = why_to_confirm(address)
    require(
        not reason,
        f"the rounds of this run are in {address}, {reason}. If you know this place and trust who invited you, "
        f"pass mailbox={address!r} too",
        JoinError,
    )
    return address


def why_to_confirm(address: str) -> str:
    """Return why another peer's address could do harm here; empty if the guest's keys belong to its store."""
    if folder_at(address) is not None:
        return "a folder of this machine"
    endpoint = options_of(address).get("endpoint", "").rstrip("/")
    own = {os.environ.get(name, "").rstrip("/") for name in _OWN_ENDPOINTS}
    if not endpoint or endpoint in own:
        return ""
    danger = f"a store at {urlsplit(endpoint).netloc}, where your keys would sign requests"
    if endpoint.startswith("http:"):
        return f"{danger}, without encryption"
    return danger
