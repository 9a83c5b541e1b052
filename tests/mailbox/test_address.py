"""What an address of a mailbox may say, and what an invitation cannot make a guest's machine do."""

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import colab_swarm as cs
from colab_swarm.errors import InviteError, JoinError
from colab_swarm.invite import Invite, SignedMailbox
from colab_swarm.mailbox.address import checked_address, confirmed_address, folder_at
from colab_swarm.mailbox.bucket import Bucket
from colab_swarm.net.identity import Identity

R2 = "s3://bucket/folder?endpoint=https://account.r2.cloudflarestorage.com&region=auto"


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket",
        "s3://bucket/a/b?region=eu-west-1",
        R2,
        "gs://bucket/x",
        "az://box",
        "file:///mnt/a b",
        "memory://x",
    ],
)
def test_an_address_with_known_options_is_returned(address: str) -> None:
    assert checked_address(address) == address


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("s3://bucket?access_key_id=AKIA", "no options but endpoint and region.*never in an address"),
        ("az://box?federated_token_file=/etc/passwd", "no options but"),
        ("az://box?msi_endpoint=http://127.0.0.1/", "no options but"),
        ("s3://bucket?web_identity_token_file=/x", "no options but"),
        ("gs://bucket?application_credentials=/x", "no options but"),
        ("s3://bucket?ENDPOINT=https://a.example", "no options but"),
        ("s3://bucket?region=a&region=b", "given twice"),
        ("s3://AKIA:secret@bucket/folder", "no keys in its address"),
        ("s3://bucket/folder#part", "no '#'"),
        ("s3://bucket?region=x@evil.example/", "a name such as eu-west-1"),
        ("s3://bucket?endpoint=https://key:secret@host.example", "is the URL of a store"),
        ("s3://bucket?endpoint=file:///etc", "is the URL of a store"),
        ("s3://bucket?endpoint=", "is the URL of a store"),
        ("s3://bu cket/x", "no name of a bucket"),
        ("s3://AKIA:secret/folder", "no name of a bucket"),
        ("s3://AKIA:secr\u2100et@bucket/folder", "characters that no store allows"),
        ("s3://bucket?AKIA7SECRET:secret", "no options but"),
        ("az://box?sv=2022&sig=a:secret", "no options but"),
        ("s3://bucket?X-Amz-Signature=a:secret&X-Amz-Credential=AKIA", "no options but"),
        ("https://bucket.s3.amazonaws.com/x?X-Amz-Signature=a:secret", "is no mailbox"),
        ("AKIA7SECRET", "is no mailbox"),
        ("AKIA7:secret@s3://bucket", "is no mailbox"),
        ("s3://bucket?endpoint=https://AKIA:secret", "is the URL of a store"),
        ("s3://bucket?region=x:secret", "a name such as eu-west-1"),
        ("gs://bucket?endpoint=https://store.example.org", "gs:// has no endpoint="),
        ("az://box/x?endpoint=https://store.example.org", "az:// has no endpoint="),
        ("az://box?endpoint=http://127.0.0.1:10000", "az:// has no endpoint="),
        ("s3://bucket/100%", "write %25"),
        ("file:///mnt/50% off", "write %25"),
        ("s3://", "no name of a bucket"),
        ("s3://bucket/\nx", "characters that no store allows"),
        ("file:///mnt/x?endpoint=https://a.example", "has no options"),
    ],
)
def test_keys_and_unknown_options_are_refused_before_anything_is_opened(address: str, problem: str) -> None:
    for call in (checked_address, lambda text: Bucket(text, "run/model")):
        with pytest.raises(ValueError, match=problem) as caught:
            call(address)
        assert not re.search("AKIA|:secret", str(caught.value)), "an error shows no key"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("file:///mnt/shared", "a folder of this machine"),
        ("s3://bucket?endpoint=http://storage.example.org", "without encryption"),
        (R2, "a store at account.r2.cloudflarestorage.com, where your keys would sign"),
        ("s3://bucket?endpoint=https://store.stranger.example.com:8443/path", "your keys"),
        ("s3://bucket?endpoint=https://127.0.0.1:9000", "your keys"),
        ("s3://bucket?endpoint=https://[::ffff:10.0.0.1]", "your keys"),
        ("s3://bucket?endpoint=https://s3.amazonaws.com.example.org", "your keys"),
    ],
)
def test_a_folder_and_a_strangers_endpoint_must_be_confirmed(address: str, reason: str) -> None:
    with pytest.raises(JoinError, match=re.escape(reason)) as caught:
        confirmed_address(address, "")
    assert f"mailbox={address!r}" in str(caught.value)
    assert confirmed_address(address, address) == address


@pytest.mark.parametrize("address", ["s3://bucket/folder?region=x", "gs://bucket", "az://box", "memory://x"])
def test_a_store_of_the_guests_own_keys_needs_no_confirmation(address: str) -> None:
    assert confirmed_address(address, "") == address


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_endpoint_of_the_guests_own_environment_needs_no_confirmation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "https://account.r2.cloudflarestorage.com/")
    assert confirmed_address(R2, "") == R2
    with pytest.raises(JoinError, match="your keys"):
        confirmed_address("s3://bucket?endpoint=https://other.r2.cloudflarestorage.com", "")


@pytest.mark.parametrize(
    ("path", "right"),
    [("per%20cent", "per%2520cent"), ("a%2Fb", "a%252Fb"), ("%41", "%2541")],
)
def test_a_folder_with_an_escape_in_its_name_is_not_taken_for_another(
    path: str, right: str, tmp_path: Path
) -> None:
    (tmp_path / path).mkdir()
    with pytest.raises(ValueError, match=f"write .*{right}"):
        folder_at(f"{tmp_path.as_uri()}/{path}")
    assert folder_at(f"{tmp_path.as_uri()}/{right}") == tmp_path / path


def test_a_space_in_a_folder_may_be_written_as_it_is_or_as_in_a_url(tmp_path: Path) -> None:
    for name in ("a b", "a%20b"):
        assert folder_at(f"{tmp_path.as_uri()}/{name}") == tmp_path / "a b"


def test_a_guest_names_its_own_path_of_a_folder_but_no_other_store() -> None:
    assert confirmed_address("file:///content/drive/theirs", "file:///mnt/mine") == "file:///mnt/mine"
    with pytest.raises(ValueError, match="the invitation's rounds are in s3://bucket"):
        confirmed_address("s3://bucket", "s3://other")
    with pytest.raises(ValueError, match="rounds are in s3://bucket"):
        confirmed_address("s3://bucket", "file:///mnt/mine")


class Collector(BaseHTTPRequestHandler):
    """Keeps all that a machine sends to it."""

    received: list[bytes]

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.received.append(f"{self.path} {self.headers}".encode() + self.rfile.read(length))
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_PUT = do_HEAD = do_DELETE = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def attacker() -> Iterator[tuple[str, list[bytes]]]:
    received: list[bytes] = []
    handler = type("Handler", (Collector,), {"received": received})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


def addresses_of(attacker: str, secret: Path) -> list[str]:
    """Addresses that made a guest's machine send a file, keys or a request to a host of the attacker's choice."""
    return [
        f"az://c/f?account_name=a&client_id=c&tenant_id=t&federated_token_file={secret}&authority_host={attacker}",
        f"az://c/f?account_name=a&msi_endpoint={attacker}/msi&endpoint={attacker}",
        f"s3://b/f?region=x&web_identity_token_file={secret}&role_arn=r&endpoint={attacker}",
        f"s3://b/f?region=x&metadata_endpoint={attacker}&endpoint={attacker}",
        f"s3://b/f?region=x&endpoint={attacker}",
        f"gs://b/f?base_url={attacker}",
        f"gs://b/f?application_credentials={secret}",
        "file:///etc",
    ]


def test_no_invitation_sends_a_file_or_keys_of_the_guest_away(
    attacker: tuple[str, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's creator itself signs these: a guest is safe from it too."""
    url, received = attacker
    secret = tmp_path / "id_rsa"
    secret.write_text("a private key")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "a key of the guest")
    with cs.create("honest", mailbox=f"memory://{tmp_path}") as alice:
        invitation = Invite.parse(str(alice.invite()))
        access = alice.network.access  # type: ignore[union-attr]
        for address in addresses_of(url, secret):
            signed = signed_by(alice, address)
            forged = invitation.with_mailbox(address, access.admission.authority, signed)  # type: ignore[union-attr]
            with pytest.raises((ValueError, JoinError)):
                cs.join(str(forged), peer_name="guest")
    assert received == []


def signed_by(swarm: cs.Swarm, address: str) -> bytes:
    return SignedMailbox(swarm.run_id, address).signed(swarm.services.peers.sign).signature


@pytest.mark.parametrize("access", ["invite", "open"])
def test_a_member_cannot_pass_an_invitation_on_with_another_mailbox(access: str, tmp_path: Path) -> None:
    with cs.create("mine", mailbox=f"memory://{tmp_path}", access=access) as alice:  # type: ignore[arg-type]
        invitation = Invite.parse(str(alice.invite()))
        for changed in (
            invitation.replaced(mailbox="s3://mallorys-bucket"),
            invitation.replaced(mailbox="s3://mallorys-bucket", mailbox_signature=b""),
            mallorys(invitation),
        ):
            with pytest.raises(InviteError, match="tampered with"):
                cs.join(str(changed), peer_name="guest")
        with (
            cs.join(str(alice.invite()), peer_name="bob") as bob,
            cs.join(str(bob.invite()), peer_name="carol") as carol,
        ):
            assert carol.services.mailbox == alice.services.mailbox and carol.run_id == alice.run_id


def mallorys(invitation: Invite) -> Invite:
    """The invitation with a mailbox that another key has signed."""
    mallory = Identity()
    signed = SignedMailbox(invitation.run_id, "s3://mallorys-bucket").signed(mallory.sign)
    return invitation.with_mailbox("s3://mallorys-bucket", mallory.public_key, signed.signature)
