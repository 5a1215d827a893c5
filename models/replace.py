"""A newly trained checkpoint takes the place of the model that ships: all that records its answers, in order.

    python models/replace.py checkpoint                 # everything; two hours on two cores, most of them notebook 07
    python models/replace.py checkpoint --from notebooks

    files        export.py writes models/qengine-10m-Q8_0.gguf and its tower's file; loss.png is the checkpoint's
    answers      tests/data/answers.json: tokens and hashes of logits on the emulated card
    transcript   the conversation of README.md, with the answers of now
    notebooks    those that run the model are run and kept anew
    tests        that the above agree, and those that ask the model something

The rest is for a person to read: LEFT lists it, and the end of a run prints it. The checkpoint may lie anywhere.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRANSCRIPT = re.compile(r"(?<=<!-- transcript -->\n```text\n).*?(?=\n```\n)", re.S)
# Notebook 01 alone has no model.
NOTEBOOKS = ("00_tour", "02_roofline", "03_gemv", "04_gemm", "05_attention", "06_delta_rule", "07_kv_bits",
             "08_across_cards", "09_serving", "10_pictures")
TESTS = ("test_shipped_model", "test_readme", "test_figures", "test_api_shipped", "test_control_tokens",
         "test_draft_block", "test_kv_models", "test_models_network", "test_models_tower", "test_house")
LEFT = """Left to do by hand:
  models/README.md            scores with their errors and goals (evaluate.py --json before and after), how it was
                              trained, known failures: talk to it
  benchmarks/results.md       losses over the minutes, what was gained and lost, what to train next
  tests/test_shipped_model.py NOT_WORKED_OUT and the answers about pictures, if these tests fail
  README.md                   read the transcript: an answer that became bad is an answer to mend
  notebooks                   sentences that quote answers or figures of the model: git diff notebooks"""


def run(*command: str, **options) -> subprocess.CompletedProcess:
    print("$", " ".join(command), flush=True)
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=True, text=True, **options)


def files(checkpoint: Path):
    run("models/export.py", str(checkpoint))
    shutil.copy(checkpoint / "loss.png", ROOT / "models" / "loss.png")


def answers(checkpoint: Path):
    """Written when all of them are there."""
    recorded = run("-m", "tests.test_shipped_model", "emulated", stdout=subprocess.PIPE).stdout
    json.loads(recorded)
    (ROOT / "tests" / "data" / "answers.json").write_text(recorded, encoding="utf-8")


def transcript(checkpoint: Path):
    """Asks what README's conversation asks, and writes the answers there."""
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    questions = questions_of(TRANSCRIPT.search(text)[0])
    said = run("qengine.py", "--chat", stdout=subprocess.PIPE, input="\n".join(questions)).stdout
    page.write_text(TRANSCRIPT.sub(lambda _: conversation(questions, said), text), encoding="utf-8")


def questions_of(conversation: str) -> list[str]:
    return [line.removeprefix("> ") for line in conversation.splitlines() if line.startswith("> ")]


def conversation(questions: list[str], said: str) -> str:
    """Questions with their answers, which have a line each; commands have none."""
    lines = said.splitlines()
    asked = [question for question in questions if not question.startswith("/")]
    if len(lines) != len(asked):
        raise ValueError(f"{len(asked)} questions of the transcript have {len(lines)} lines of answers:\n{said}")
    answered = dict(zip(asked, lines))
    return "\n".join(line for question in questions for line in (f"> {question}", answered.get(question)) if line)


def notebooks(checkpoint: Path):
    run("-m", "tests.test_notebooks", *NOTEBOOKS)


def tests(checkpoint: Path):
    run("-m", "pytest", "-q", *(f"tests/{name}.py" for name in TESTS))


STEPS = {step.__name__: step for step in (files, answers, transcript, notebooks, tests)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--from", dest="first", choices=STEPS, default="files", help="begin with this step")
    options = parser.parse_args()
    if not (options.checkpoint / "state.json").exists():
        parser.error(f"{options.checkpoint} is no checkpoint: it has no state.json")
    names = list(STEPS)
    for name in names[names.index(options.first):]:
        print(f"== {name}", flush=True)
        STEPS[name](options.checkpoint.resolve())
    print(LEFT)


if __name__ == "__main__":
    main()
