"""A process that has imported engine.hub, which takes seconds, and forks for every question. It is run with the
repository as its folder, reads one question a line, as JSON, and answers with the exit code of the process that asked.

    name, environ    what is asked for, and every variable of the environment
    before           statements that are executed first
    out, err         files for what is written
"""

import json
import os
import sys

from engine.hub import local_path
from engine.request import ModelError


def ask(name, environ, before, out, err):
    os.environ.clear()
    os.environ.update(environ)
    for number, path in (1, out), (2, err):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    exec(before, {})
    try:
        print(local_path(name, lambda text: print(text, file=sys.stderr)))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    for line in sys.stdin:
        if not (child := os.fork()):
            code = 1
            try:
                code = ask(**json.loads(line))
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
