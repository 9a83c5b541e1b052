"""A program of the lab: captures every byte on the host's interfaces, and reports whether given bytes are among them.

    python -m tests.netlab.sniffer

Answers each line on stdin, a JSON list of texts in hex, by how many bytes it has kept and how many of the texts are
among them.
"""

import json
import socket
import sys
import threading

ETH_P_ALL, LONGEST_BYTES, BUFFER_BYTES = 3, 1 << 17, 1 << 26
_SO_RCVBUFFORCE = 33


def keep(capture: socket.socket, packets: list[bytes]) -> None:
    while True:
        packets.append(capture.recv(LONGEST_BYTES))


def main() -> None:
    capture = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    capture.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, BUFFER_BYTES)
    packets: list[bytes] = []
    threading.Thread(target=keep, args=(capture, packets), daemon=True).start()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        kept = b"\n".join(packets)
        found = sum(bytes.fromhex(text) in kept for text in json.loads(line))
        print(json.dumps({"kept": len(kept), "found": found}), flush=True)


if __name__ == "__main__":
    main()
