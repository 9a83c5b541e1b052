"""What an address of a mailbox may say, and what an invitation cannot make a guest's machine do."""

import re
import socket
from pathlib import Path

import pytest

import colab_swarm as cs
from colab_swarm.errors import InviteError, JoinError
from colab_swarm.invite import Invite, SignedMailbox
from colab_swarm.mailbox.address import checked_address, confirmed_address, folder_at
from colab_swarm.mailbox.bucket import Bucket
from colab_swarm.net.identity import Identity

R2 = "s3://bucket/folder?endpoint=https://account.r2.cloudflarestorage.com&region=auto"
OWN_STORES = ("s3://bucket/a/b?region=eu-west-1", "s3://bucket", "gs://bucket/x", "az://box", "memory://x")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("s3://bucket?access_key_id=AKIA", "no options but endpoint and region.*never in an address"),
        ("az://box?federated_token_file=/etc/passwd", "no options but"),
        ("s3://bucket?X-Amz-Signature=a:secret&X-Amz-Credential=AKIA", "no options but"),
        ("s3://bucket?region=a&region=b", "given twice"),
        ("s3://AKIA:secret@bucket/folder", "no keys in its address"),
        ("s3://bucket/folder#part", "no '#'"),
        ("s3://bucket?region=x@evil.example/", "a name such as eu-west-1"),
        ("s3://bucket?endpoint=https://key:secret@host.example", "is the URL of a store"),
        ("s3://bucket?endpoint=https://AKIA:secret", "is the URL of a store"),
        ("s3://bucket?endpoint=file:///etc", "is the URL of a store"),
        ("s3://", "no name of a bucket"),
        ("s3://bu cket/x", "no name of a bucket"),
        ("s3://AKIA:secret/folder", "no name of a bucket"),
        ("s3://AKIA:secr\u2100et@bucket/folder", "characters that no store allows"),
        ("s3://bucket/\nx", "characters that no store allows"),
        ("https://bucket.s3.amazonaws.com/x?X-Amz-Signature=a:secret", "is no mailbox"),
        ("AKIA7:secret@s3://bucket", "is no mailbox"),
        *((text, "is no mailbox") for text in ("", "bucket", "file://relative", "S3://bucket")),
        ("gs://bucket?endpoint=https://store.example.org", "gs:// has no endpoint="),
        ("az://box?endpoint=http://127.0.0.1:10000", "az:// has no endpoint="),
        ("s3://bucket/100%", "write %25"),
        ("file:///mnt/x?endpoint=https://a.example", "has no options"),
        ("s3://" + "x" * 200, "205 characters: at most 200 fit"),
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
        ("s3://bucket?endpoint=https://[::ffff:10.0.0.1]", "your keys"),
        ("s3://bucket?endpoint=https://s3.amazonaws.com.example.org", "your keys"),
    ],
)
def test_a_folder_and_a_strangers_endpoint_must_be_confirmed(address: str, reason: str) -> None:
    with pytest.raises(JoinError, match=re.escape(reason)) as caught:
        confirmed_address(address, "")
    assert f"mailbox={address!r}" in str(caught.value)
    assert confirmed_address(address, address) == address


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_store_of_the_guests_own_keys_needs_no_confirmation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "https://account.r2.cloudflarestorage.com/")
    for address in (*OWN_STORES, R2):
        assert checked_address(address) == confirmed_address(address, "") == address
    with pytest.raises(JoinError, match="your keys"):
        confirmed_address("s3://bucket?endpoint=https://other.r2.cloudflarestorage.com", "")


def test_an_escape_in_a_folders_name_is_not_taken_for_another_and_a_space_needs_none(tmp_path: Path) -> None:
    for path, right in (("per%20cent", "per%2520cent"), ("a%2Fb", "a%252Fb"), ("%41", "%2541")):
        (tmp_path / path).mkdir()
        with pytest.raises(ValueError, match=f"write .*{right}"):
            folder_at(f"{tmp_path.as_uri()}/{path}")
        assert folder_at(f"{tmp_path.as_uri()}/{right}") == tmp_path / path
    for name in ("a b", "a%20b"):
        assert folder_at(f"{tmp_path.as_uri()}/{name}") == tmp_path / "a b"


def test_a_guest_names_its_own_path_of_a_folder_but_no_other_store() -> None:
    assert confirmed_address("file:///content/drive/theirs", "file:///mnt/mine") == "file:///mnt/mine"
    for other in ("s3://other", "file:///mnt/mine"):
        with pytest.raises(ValueError, match="the invitation's rounds are in s3://bucket"):
            confirmed_address("s3://bucket", other)


def signed_by(identity: Identity, invitation: Invite, address: str) -> Invite:
    """The invitation with a mailbox that this key has signed."""
    signed = SignedMailbox(invitation.run_id, address).signed(identity.sign)
    return invitation.with_mailbox(address, identity.public_key, signed.signature)


def test_no_invitation_sends_a_file_or_keys_of_the_guest_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's creator itself signs these: a guest is safe from it too."""
    secret = tmp_path / "id_rsa"
    secret.write_text("a private key")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "a key of the guest")
    with (
        socket.create_server(("127.0.0.1", 0)) as attacker,
        cs.create("honest", mailbox=f"memory://{tmp_path}") as alice,
    ):
        host = f"http://127.0.0.1:{attacker.getsockname()[1]}"
        invitation = Invite.parse(str(alice.invite()))
        for address in (
            f"az://c/f?account_name=a&client_id=c&tenant_id=t&federated_token_file={secret}&authority_host={host}",
            f"az://c/f?account_name=a&msi_endpoint={host}/msi&endpoint={host}",
            f"s3://b/f?region=x&web_identity_token_file={secret}&role_arn=r&endpoint={host}",
            f"s3://b/f?region=x&endpoint={host}",
            f"gs://b/f?base_url={host}",
            "file:///etc",
        ):
            with pytest.raises((ValueError, JoinError)):
                cs.join(str(signed_by(alice.services.peers, invitation, address)), peer_name="guest")
        attacker.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has come
            attacker.accept()


@pytest.mark.parametrize("access", ["invite", "open"])
def test_a_member_cannot_pass_an_invitation_on_with_another_mailbox(access: str, tmp_path: Path) -> None:
    with cs.create("mine", mailbox=f"memory://{tmp_path}", access=access) as alice:  # type: ignore[arg-type]
        invitation = Invite.parse(str(alice.invite()))
        for changed in (
            invitation.replaced(mailbox="s3://mallorys-bucket"),
            invitation.replaced(mailbox="s3://mallorys-bucket", mailbox_signature=b""),
            signed_by(Identity(), invitation, "s3://mallorys-bucket"),
        ):
            with pytest.raises(InviteError, match="tampered with"):
                cs.join(str(changed), peer_name="guest")
        with (
            cs.join(str(alice.invite()), peer_name="bob") as bob,
            cs.join(str(bob.invite()), peer_name="carol") as carol,
        ):
            assert carol.services.mailbox == alice.services.mailbox and carol.run_id == alice.run_id
