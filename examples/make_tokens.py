#!/usr/bin/env python3
"""Makes a token file for `zeroplan run --data FILE` from text, one token a byte (docs/files.md, "Token files").

    examples/make_tokens.py README.md docs/*.md --out docs.tokens

The vocabulary is 256, or more with --vocab (a model's vocabulary is often padded). The file is written whole or not at
all. Only Python's standard library is needed.
"""

import argparse
import os
import struct
import sys
import tempfile
import zlib


def header(bytes_per_token, vocab, count):
    start = struct.pack("<8sIIQQI", b"ZPTOKENS", 1, bytes_per_token, vocab, count, 0)
    return start + struct.pack("<I", zlib.crc32(start))


def widen(data, bytes_per_token):
    """Each byte as a little-endian integer."""
    wide = bytearray(len(data) * bytes_per_token)
    wide[::bytes_per_token] = data
    return wide


def write(paths, out, vocab):
    bytes_per_token = 2 if vocab <= 1 << 16 else 4
    folder = os.path.dirname(os.path.abspath(out))
    count = 0
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".make_tokens-", delete=False) as file:
        try:
            file.write(header(bytes_per_token, vocab, 0))
            for path in paths:
                with open(path, "rb") as text:
                    while data := text.read(1 << 20):
                        file.write(widen(data, bytes_per_token))
                        count += len(data)
            file.seek(0)
            file.write(header(bytes_per_token, vocab, count))
            file.flush()
            os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(file.name, 0o666 & ~umask)
            os.replace(file.name, out)
        except BaseException:
            os.unlink(file.name)
            raise
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", nargs="+", help="files, read one after the other")
    parser.add_argument("--out", required=True, help="the token file")
    parser.add_argument("--vocab", type=int, default=256, help="vocabulary that the file states (256)")
    args = parser.parse_args()
    if not 256 <= args.vocab < 1 << 31:
        parser.error("--vocab: expected 256 to 2147483647, got %d" % args.vocab)
    if os.path.exists(args.out) and not os.path.isfile(args.out):
        parser.error("--out: %s is not a regular file" % args.out)
    try:
        count = write(args.text, args.out, args.vocab)
    except OSError as error:
        sys.exit("make_tokens.py: %s" % error)
    print("%s: %d tokens, vocabulary %d" % (args.out, count, args.vocab))


if __name__ == "__main__":
    main()
