"""A scripted engine that takes its time, as a real one does: streams can be watched, stopped and left."""

import threading
import time

from engine.request import EngineStopped
from tests.scripted import END, ScriptedEngine, end_of


class PacedEngine(ScriptedEngine):
    """Writes a token every `pace` seconds until it is cancelled; the first one comes after `delay`. is_reading: whether
    the engine says meanwhile how much of the prompt is read."""

    def __init__(self, script="", pace=0.0, delay=0.0, sees=False, is_reading=False):
        super().__init__(script, sees=sees)
        self.pace, self.delay, self.is_reading = pace, delay, is_reading

    def submit(self, request):
        request.check(self.tokenizer.n_vocab, self.n_ctx)
        self.requests.append(request)
        generation = self.begin(request)
        generation.n_cached = generation.n_prompt // 64 * 64
        self.generations.append(generation)
        threading.Thread(target=self._write, args=(generation,), daemon=True).start()
        return generation

    def _write(self, generation):
        request = generation.request
        prompt = self.tokenizer.decode(request.prompt_ids, special=True)
        began, error = time.monotonic(), None
        try:
            text = self.script(prompt) if callable(self.script) else self.script
            self._read(generation, began)
            end = time.monotonic()
            for n, token in enumerate([*self.tokenizer.encode(text), END], start=1):
                while time.monotonic() < end and not generation.cancelled:
                    time.sleep(0.002)
                end = max(end + self.pace, time.monotonic())        # after a stall it does not catch up
                if generation.cancelled or generation.push(token, end_of(request, token, n)):
                    break
        except EngineStopped as failure:        # raised by a script
            error = failure
        generation.close(error)

    def _read(self, generation, began):
        """Until the delay is over, which a test may shorten meanwhile."""
        while not generation.cancelled and (passed := time.monotonic() - began) < (delay := self.delay):
            if self.is_reading:
                generation.n_read = int(generation.n_prompt * passed / delay)
            time.sleep(0.002)
