"""The smallest whole program: open a session, append token ids, generate, append again.

pip install ./sdks/python           # in the repository's folder
python minimal_session.py [TARGET]
"""

import sys

from kakeya import Client

with Client(*sys.argv[1:2]) as client, client.create_session(label="minimal") as session:
    session.append([1, 2, 3, 4])
    for token_id in session.generate(16):
        print(token_id, end=" ", flush=True)
    length = session.append([5, 6])
    print(f"\n{length} tokens in the history, at most {session.peak_bytes} bytes of K/V")
