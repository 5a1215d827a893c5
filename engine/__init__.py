"""Parts of the engine that the heart, qengine.py, uses and that know nothing of it: no file here imports qengine."""
