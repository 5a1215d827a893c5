"""One model on several machines: whole engines, replicas, that Ray Serve starts, watches, restarts and replaces.

    front (HTTP, api/) ── answer(id, request) ──Ray──> replica: Ray Serve's actor, and in it an engine with its cards
          ▲                                              │
          └──── batches of events of all answers ──Ray───┘

A front is the process with the HTTP server. For it, all replicas of a model together are one engine: `front.py` has
what engine/text_engine.py and engine/pooling.py ask of one. Each answer is one call of Ray Serve, which lasts as long
as the answer; so Ray Serve lets a replica finish before it goes. The tokens come by another way: each replica has one
stream to each front, in which a message carries all that has happened to all answers since the message before. So the
price of a message is shared by the answers that run together. A front asks for the next stream every few seconds; a
replica that is not asked any more ends that front's answers.

    marks and loads     table.py    what a front knows of replicas, and which of them a request should go to
    words on the wire   wire.py     what crosses the network
    the front's jobs    jobs.py     an answer whose tokens come from elsewhere, and that may begin again elsewhere
    the front           front.py    the engine that a server sees
    the choice          router.py   Ray Serve asks here where a call goes
    the replica         actor.py    what Ray Serve runs beside the cards
    its answers         feed.py     what one front hears of them, and that they end when it is gone
    the cluster         cluster.py  joining one, what is placed there, its nodes
    the number          scaling.py  how many replicas a load needs
    model files         files.py    taken from the front's node where a replica's node lacks them
    kept files          store.py    what tells a file from others, and the room that fetched ones may take

Only router.py, cluster.py, files.py and a replica that starts import Ray, which is an extra (requirements-ray.txt).
"""

import os

# Ray reads both when it is imported, so they are set here, before any file of this room. Without the first one Ray
# reports to its makers. Without the second one a thread that Ray Serve leaves behind joins the cluster again after this
# process has left it.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
