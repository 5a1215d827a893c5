"""The Links of this process, for router.py, which Ray Serve makes on its own."""

LINKS: dict[str, object] = {}       # name of the application -> the Link of engine/replicas/front.py
