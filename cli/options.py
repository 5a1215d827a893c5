"""The options of the command line: what they mean, which go together, and the help. The help appears at once, because
this module imports nothing that takes time."""

import argparse
import functools
import json
import sys

from engine import limits
from engine.limits import IMAGE_TOKENS, MOST_DRAFTS, SAMPLING, SPARSE
from kernels.limits import CHECK_ROWS, FLOAT16, KV_NAMES, WISHES

from .named import AddModel, check_models, model_argument

EXAMPLES = """\
examples:
  python qengine.py                                                 talk with the small model that comes along
  python qengine.py -m synthetic:tiny -p "Hello" --max-tokens 32    random weights: a first run without a file
  python qengine.py -m model.gguf --chat                            talk with a model
  python qengine.py -m hf:OWNER/NAME-GGUF:Q8_0 --chat               the same with one of the Hugging Face Hub
  python qengine.py -m hf:OWNER/NAME -p "Who?" --image cat.jpg      ask about a picture
  python qengine.py -m model.gguf --serve                           OpenAI-compatible server on port 8080
  python qengine.py -m m.gguf --serve --embedding-model e.gguf      the same, with /v1/embeddings
  python qengine.py -m a=a.gguf -m b=b.gguf,idle=10m --serve        two models, one loaded when asked for
  python qengine.py -m m.gguf --serve --ray auto --replicas 3       three replicas on a cluster of Ray
  python qengine.py -m model.gguf --perplexity text.txt             how well the model predicts a text
  python qengine.py --probe                                         what this card's pipes and memory can do
  python qengine.py -m model.gguf --bench                           how fast the model runs on it
  python qengine.py -m model.gguf --plan --card cuda                what it would take of all cards together
"""

DRAIN_SECONDS = 30

# --bench measures these, unless other lengths are named.
PROMPT_LENGTHS, CONTEXTS, REPEATS = (297, 1160, 4620, 18400), (297, 4620, 18400), 3
EMULATED_LENGTH = 297       # the only prompt and context on the emulated card, unless others are named
DECODE_STEPS = 32           # of one timed run
ACCEPTANCE = 0.75           # share of drafts that are right, unless --acceptance says otherwise

TASKS = "prompt", "chat", "serve", "perplexity", "bench", "probe", "plan", "print_config"

# Options that do nothing unless one of the options beside them is there, too.
GOES_WITH = {"raw": ["prompt"], "slots": ["serve", "plan", "print_config"], "kv_tokens": ["serve", "plan"],
             "ray": ["serve"], "replicas": ["ray"],
             **dict.fromkeys(["host", "api_key", "api_key_file", "cors", "allow_image_urls", "log_prompts", "go_on",
                             "tls_cert", "tls_key", "drain"], ["serve"]),
             **dict.fromkeys(["checkpoint_memory", "checkpoint_host_memory"], ["serve", "chat", "plan"]),
             **dict.fromkeys(["embedding_model", "reranking_model"], ["serve", "plan"]),
             "embedding_card": ["embedding_model"], "reranking_card": ["reranking_model"],
             "trace": ["prompt", "chat", "serve", "perplexity", "bench"],
             **dict.fromkeys(["against", "against_kv"], ["perplexity"]), "json": ["bench", "probe"],
             **dict.fromkeys(["prompt_lengths", "contexts", "repeats", "batch", "cards", "acceptance", "check_widths",
                              "expert_hits"], ["bench"]),
             "draft": ["prompt", "chat", "serve", "bench", "plan"], "image": ["prompt"],
             **dict.fromkeys(["mmproj", "image_tokens"], ["image", "chat", "serve", "plan"]),
             **dict.fromkeys(["products", "memory", "sparse"],
                             ["prompt", "chat", "serve", "perplexity", "bench", "plan"]),
             "system": ["prompt", "chat"],
             **dict.fromkeys([*SAMPLING, "thinking", "chat_template_kwargs", "repetition_guard"],
                             ["prompt", "chat", "serve"])}


# Options of llama.cpp that have another name here, or that are not needed.
LLAMA_CPP = {**dict.fromkeys(["-hf", "--hf-repo"], "say -m hf:OWNER/NAME"),
             **dict.fromkeys(["-c", "--ctx-size"], "say --ctx"), "-mm": "say --mmproj",
             **dict.fromkeys(["-n", "--predict", "--n-predict"], "say --max-tokens"), "--port": "say --serve PORT",
             **dict.fromkeys(["-np", "--parallel"], "say --slots"), "--temp": "say --temperature", "-s": "say --seed",
             **dict.fromkeys(["-cnv", "--conversation"], "say --chat"), "--repeat-penalty": "say --repetition-penalty",
             **dict.fromkeys(["-sys", "--system-prompt"], "say --system"),
             **dict.fromkeys(["-ts", "--tensor-split"], "say --split, the layers of each card"),
             **dict.fromkeys(["-dev", "--device"], "say --card"), **dict.fromkeys(["-f", "--file"], "say -p - < FILE"),
             **dict.fromkeys(["-i", "--interactive"], "say --chat"),
             **dict.fromkeys(["-sm", "--split-mode"], "leave it out, several cards share the layers; --split says how"),
             **dict.fromkeys(["-md", "--model-draft"], "leave it out, drafts need no model of their own"),
             **dict.fromkeys(["-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot", "--override-tensor"],
                             "leave it out, experts for which cards lack memory stay on the host; --expert-memory says "
                             "how much they get"),
             "--reasoning-budget": "say --thinking-budget, or --thinking off",
             **dict.fromkeys(["-a", "--alias"], "say -m NAME=FILE"), "--list-devices": "say --probe",
             **dict.fromkeys(["--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"],
                             "leave it out, the model's file says it"),
             "--jinja": "leave it out, the model's own template is always used",
             **dict.fromkeys(["--mmap", "--no-mmap", "--mlock"], "leave it out, files are read as suits the machine"),
             **dict.fromkeys(["-co", "--color"], "leave it out, a terminal gets colours"),
             **dict.fromkeys(["-ctk", "-ctv", "--cache-type-k", "--cache-type-v"], "say --kv"),
             **dict.fromkeys(["-ngl", "--gpu-layers", "--n-gpu-layers"], "leave it out, all layers are on the cards"),
             **dict.fromkeys(["-fa", "--flash-attn", "-b", "--batch-size", "-ub", "--ubatch-size", "-t", "--threads"],
                             "leave it out, the engine knows best")}


class Parser(argparse.ArgumentParser):
    error_of = ""               # where the mistake is, if not in the command line itself

    def parse_args(self, args=None, namespace=None):
        for word in sys.argv[1:] if args is None else args:
            if said := LLAMA_CPP.get(word.partition("=")[0]):
                self.error(f"{word} is an option of llama.cpp: {said}")
        return super().parse_args(args, namespace)

    def error(self, message):
        self.exit(2, f"qengine: {self.error_of}{message} (see --help)\n")


def within(kind: type, low, high):
    """An argparse type: an int or a float from `low` to `high`, as a row of SAMPLING says."""
    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            meant = "a whole number, as in 16384" if kind is int else "a number, as in 15.5"
            raise argparse.ArgumentTypeError(f"must be {meant}, not {text!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text}")
        return value

    return convert


def whole_numbers(text: str) -> tuple[int, ...]:
    """An argparse type: "297,4620"."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) >= 2**31 - DECODE_STEPS - 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers from 1 on with commas, not {text!r}")
    return numbers


def draft(text: str) -> str | int:
    """An argparse type, as `qengine.load` takes it: "auto", or the most drafts of a check; "off" is 0."""
    if text == "auto":
        return text
    if text != "off" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be auto, off, or the most drafts from 1 to {MOST_DRAFTS}, not {text!r}")
    return within(int, 0, MOST_DRAFTS)("0" if text == "off" else text)


def template_variables(text: str) -> dict:
    """An argparse type: a JSON object with variables of a chat template. Those of the engine itself are refused, but
    enable_thinking may be true or false."""
    try:
        variables = json.loads(text)
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object, as in {{"preserve_thinking": false}}, not {text!r}')
    if taken := sorted((limits.OWN_NAMES - {"enable_thinking"}) & variables.keys()):
        raise argparse.ArgumentTypeError(f"may not set {taken[0]!r}")
    if not isinstance(variables.get("enable_thinking", True), bool):
        raise argparse.ArgumentTypeError("'enable_thinking' is neither true nor false")
    return variables


def image_tokens(text: str) -> tuple[int, int]:
    """An argparse type: "64,4096"."""
    from engine.images import Limits, RequestError      # here: imports that the help does not need
    try:
        least, most = whole_numbers(text)
        return Limits.of((least, most))[:2]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be the fewest and the most, as in 64,4096, not {text!r}") from None
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def replicas(text: str) -> tuple[int, int]:
    """An argparse type: "3", "1,4" for one to four by load, or "0", which ends all."""
    numbers = (0,) if text == "0" else whole_numbers(text)
    if len(numbers) > 2 or numbers[-1] < numbers[0] or numbers[-1] > limits.MOST_REPLICAS:
        raise argparse.ArgumentTypeError(f"must be one number or the fewest and the most, up to "
                                         f"{limits.MOST_REPLICAS}, not {text!r}")
    return numbers[0], numbers[-1]


def listed(numbers) -> str:
    return ",".join(map(str, numbers))


def build_parser() -> Parser:
    parser = Parser(
        usage="python qengine.py [-m MODEL] [-p TEXT | --chat | --serve [PORT] | --perplexity FILE |\n"
              "                         --bench | --probe | --plan] [options]",
        description="Runs a Qwen3.5 or Qwen3.6 model on NVIDIA cards or, without one, on an emulated card.",
        epilog=EXAMPLES, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(models=[])
    parser.add_argument("--version", action="version", version=f"qengine {limits.VERSION}", help="print the version")
    parser.add_argument("-m", "--model", metavar="MODEL", default=limits.DEFAULT_MODEL, action=AddModel,
                        type=model_argument,
                        help="a GGUF file (if it has several parts, the first), a model of the Hugging Face Hub: "
                             "hf:OWNER/NAME, also with :Q4_K_M or :FILE at the end, or random weights: "
                             "synthetic:0.8b, synthetic:9b:q4_k, ... (default: the small model that comes with "
                             "qengine). With --serve or --plan there may be several, each as NAME=MODEL with options "
                             "of its own: chat=a.gguf,ctx=16384,aliases=gpt-4o,idle=10m. A model with idle=TIME or "
                             "idle=never is loaded at its first request, and unloaded after so long without a "
                             "request, or to make room for another model")
    for add in (add_tasks, add_answer, add_pictures, add_comparison, add_bench, add_server, add_replicas,
                add_side_models, add_machine):
        add(parser)
    return parser


def add_tasks(parser: Parser):
    what = parser.add_argument_group("what to do (one of these; at a terminal a chat, if none is named)")
    what = what.add_mutually_exclusive_group()
    what.add_argument("-p", "--prompt", metavar="TEXT", help="answer this text and leave; - reads it from stdin")
    what.add_argument("--chat", action="store_true",
                      help="a conversation in the terminal (Ctrl-C stops an answer, Ctrl-D leaves, /help "
                           "lists commands)")
    what.add_argument("--serve", metavar="PORT", nargs="?", type=within(int, 0, 65535), const=8080,
                      help="an OpenAI-compatible HTTP server (default port: 8080)")
    what.add_argument("--perplexity", metavar="FILE",
                      help="how well the model predicts a UTF-8 text, read as by -p --raw: the text is cut into "
                           "windows of --ctx tokens, and each token is predicted once, from the tokens before it in "
                           "its window (the first token of a window from the whole window before)")
    what.add_argument("--bench", action="store_true",
                      help="tokens/s of prompts and of answers, how much of the card they use and where the "
                           "time goes; needs a card that does nothing else, and probes it if nobody did")
    what.add_argument("--probe", action="store_true",
                      help="measure what the card's instructions, memory and launches can do, name what is "
                           "throttled, and keep the result; uses no model")
    what.add_argument("--plan", action="store_true",
                      help="show what the model would take of each card's memory, the longest context that fits, and "
                           "what passing from card to card costs; loads nothing (a GB has 2^30 bytes)")
    what.add_argument("--print-config", action="store_true",
                      help="show the model's configuration, and what --ctx, --slots and --card make of it")


def add_answer(parser: Parser):
    answer = parser.add_argument_group("the answer")
    for name, (kind, low, high, meaning) in SAMPLING.items():
        answer.add_argument("--" + name.replace("_", "-"), metavar="N" if kind is int else "X",
                            type=within(kind, low, high), help=meaning)
    answer.add_argument("--system", metavar="TEXT", help="the system message of a chat template")
    answer.add_argument("--thinking", choices=("on", "off"),
                        help="let the model reason before it answers (default: as its chat template says)")
    answer.add_argument("--chat-template-kwargs", metavar="JSON", type=template_variables,
                        help='variables of the chat template that a request does not set, for example '
                             '{"reasoning_effort": "low", "preserve_thinking": false}')
    answer.add_argument("--repetition-guard", choices=("on", "off"),
                        help=f"end an answer once its last {limits.REPEATED_TOKENS} tokens only repeat a text of "
                             f"at most {limits.LONGEST_PERIOD} tokens that is not in the prompt (default: on)")
    answer.add_argument("--raw", action="store_true", help="continue the -p text as it stands")


def add_pictures(parser: Parser):
    pictures = parser.add_argument_group("pictures, for models with eyes")
    pictures.add_argument("--image", metavar="FILE", action="append", default=[],
                          help="with -p: a picture that the text is about (PNG, JPEG, WebP, GIF); several are allowed; "
                               "in --chat, /image FILE shows one with the next message")
    pictures.add_argument("--mmproj", metavar="FILE",
                          help="the file with the model's eyes, named as for -m; synthetic for random ones, none for a "
                               "model that reads text alone (default: of a model of the Hub the one beside it; the "
                               "small model has its own)")
    pictures.add_argument("--image-tokens", metavar="MIN,MAX", type=image_tokens,
                          help="the fewest and the most tokens that a picture is stretched to, each of 32 x 32 pixels "
                               f"(default: {listed(IMAGE_TOKENS)})")


def add_comparison(parser: Parser):
    compare = parser.add_argument_group("with --perplexity")
    compare.add_argument("--against", metavar="OTHER",
                         help="also OTHER's figures, and how far MODEL's predictions are from OTHER's (KL "
                              "divergence, likeliest tokens); both must have the same vocabulary, and both are "
                              "loaded at once")
    compare.add_argument("--against-kv", metavar="FORMAT", choices=KV_NAMES,
                         help="compare with OTHER, or without --against with MODEL itself, with keys and values in "
                              f"this format (see --kv; default for OTHER: {FLOAT16})")


def add_bench(parser: Parser):
    bench = parser.add_argument_group("with --bench (in brackets: on the emulated card)")
    lengths = functools.partial(bench.add_argument, type=whole_numbers, metavar="N,N")
    lengths("--prompt-lengths",
            help=f"tokens of the prompts (default: {listed(PROMPT_LENGTHS)} [{EMULATED_LENGTH}])")
    lengths("--contexts", help=f"tokens before the answers (default: {listed(CONTEXTS)} [{EMULATED_LENGTH}])")
    bench.add_argument("--repeats", metavar="N", type=within(int, 1, 1000),
                       help=f"measure so many times, and show the median (default: {REPEATS} [1])")
    bench.add_argument("--batch", metavar="N", type=within(int, 1, 256), default=1,
                       help="answers decoded at the same time (default: 1)")
    bench.add_argument("--acceptance", metavar="P", type=within(float, 0, 1),
                       help="with --draft N: also decodes with N drafts in each step, the tokens of a run without "
                            f"drafts; each is right with this probability (default: {ACCEPTANCE})")
    bench.add_argument("--check-widths", metavar="N,N", type=whole_numbers,
                       help=f"also time steps that check so many rows of each answer: 1,2,4,{CHECK_ROWS}")
    bench.add_argument("--expert-hits", metavar="P", type=within(float, 0, 1),
                       help="random weights use all experts evenly, which no trained model does: with this option, the "
                            "experts of answers are made up, each with this probability one of a few hot ones of its "
                            "layer (for synthetic mixtures of experts, best with --expert-memory)")
    bench.add_argument("--cards", metavar="N,N", type=whole_numbers,
                       help="measure on so many cards, one number after the other, and then compare: 1,2 (default: "
                            "once, on all that --card names, or else on those that the model needs)")
    bench.add_argument("--json", metavar="FILE", help="write everything there, too; also with --probe")


def add_server(parser: Parser):
    server = parser.add_argument_group("with --serve")
    server.add_argument("--host", metavar="ADDRESS", default="127.0.0.1",
                        help="address to listen on (default: 127.0.0.1, this machine only)")
    server.add_argument("--slots", metavar="N", type=within(int, 1, 256), default=1,
                        help="answers generated at the same time (default: 1)")
    server.add_argument("--api-key", metavar="KEY", action="append", default=[],
                        help="answer only requests with this key; several are allowed; other users of this machine can "
                             "read a command line")
    server.add_argument("--api-key-file", metavar="FILE",
                        help="the same for each line of a file; lines that begin with # are comments")
    server.add_argument("--cors", metavar="ORIGIN", action="append", default=[],
                        help="let web pages of this origin ask, as https://chat.example; * for all; several are "
                             "allowed; behind a proxy without keys this server's own page needs it, too")
    server.add_argument("--tls-cert", metavar="FILE",
                        help="serve over https with this certificate (PEM, followed by those of its authorities)")
    server.add_argument("--tls-key", metavar="FILE", help="the certificate's private key (PEM, without a password)")
    server.add_argument("--drain", metavar="SECONDS", type=within(float, 0, 86400), default=DRAIN_SECONDS,
                        help="after SIGTERM or SIGHUP new requests are refused, and running ones may go on for so long "
                             f"(default: {DRAIN_SECONDS}); a second signal ends the wait")
    server.add_argument("--allow-image-urls", action="store_true",
                        help="fetch pictures that requests name by an address of the web, from public addresses only")
    server.add_argument("--log-prompts", action="store_true", help="write the text of prompts into the log of requests")

    server.add_argument("--go-on", action="store_true",
                        help="when a card fails, load the model anew onto the others if it fits there, and serve on")


def add_replicas(parser: Parser):
    several = parser.add_argument_group("replicas on several machines, with --serve (needs requirements-ray.txt)")
    several.add_argument("--ray", metavar="ADDRESS",
                         help="run the models as replicas that Ray places on the nodes of its cluster at this address "
                              "(HOST:6379, auto), or local: a cluster of this machine alone")
    several.add_argument("--replicas", metavar="N[,MAX]", type=replicas, default=(1, 1),
                         help="how many of each model, or from N to MAX as the load asks for (default: 1); -m may say "
                              "it for each: chat=a.gguf,replicas=1,4. They go on when the server ends; 0 ends those of "
                              "all models, and serves nothing")


def add_side_models(parser: Parser):
    side = parser.add_argument_group("models beside the main one, with --serve or --plan")
    for kind, paths in ("embedding", "/v1/embeddings"), ("reranking", "/v1/rerank"):
        side.add_argument(f"--{kind}-model", metavar="MODEL",
                          help=f"answers {paths}; it is loaded first, and the main model gets the memory that is left")
        side.add_argument(f"--{kind}-card", metavar="CARD",
                          help="where, named as for --card (default: the main model's first card)")


def add_machine(parser: Parser):
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--trace", metavar="FILE",
                         help="write a timeline of cards and threads for ui.perfetto.dev or chrome://tracing: "
                              "kernels, copies and waits; this makes everything slower")
    machine.add_argument("--card", metavar="CARD",
                         help="cuda:0 for one, cuda:0,2 or cuda (all) for several that share the layers, or emulated, "
                              "emulated:3, emulated:3@0.25 (links of 0.25 GB/s), emulated:cmp-100-210,v100 (like cards "
                              "of these types) (default: the first NVIDIA card if the model fits there, or else all of "
                              "them; without any an emulated card)")
    machine.add_argument("--split", metavar="N,N", type=whole_numbers,
                         help="layers on each card (default: so that the slowest card is as fast as memory allows)")
    machine.add_argument("--draft", metavar="auto|off|N", type=draft,
                         help="next tokens are guessed and checked several at a time, which makes answers faster and "
                              f"changes none: as many as pay (auto), none, or at most N, 1 to {MOST_DRAFTS} (default: "
                              "auto; --bench: none)")
    machine.add_argument("--ctx", metavar="N", type=within(int, 1, 2**31 - 1),
                         help="tokens a conversation may have, prompt and answer together "
                              f"(default: {limits.DEFAULT_CTX}, or the model's own where that is less)")
    machine.add_argument("--kv-tokens", metavar="N", type=within(int, 1, 2**31 - 1),
                         help="tokens of all conversations together, running ones and those kept for their "
                              f"next turn (default: slots x ctx, and {limits.KEPT_CONTEXTS} times as many where there "
                              "is memory)")
    machine.add_argument("--kv", metavar="FORMAT", choices=KV_NAMES, default=FLOAT16,
                         help="how keys and values are kept: as halves, in 8 bits (q8), keys in 8 bits and values in 4 "
                              "or 3 (q8+4, q8+3), both in 4 bits (q4) or in 3 (q3); fewer bits make room for longer "
                              f"texts, and answers less exact (default: {FLOAT16})")
    machine.add_argument("--sparse", metavar="WHEN", nargs="?", choices=SPARSE, const="on", default="off",
                         help="long prompts leave out keys of little weight, which reads them faster and changes "
                              "answers a little: on, unless a request refuses; ask, only where a request asks "
                              '("sparse": true); without WHEN, on (default: off)')
    for where, default in (("", "a quarter of what is free; a card keeps two at least, and one where there is no room"),
                           ("host-", "an eighth of the machine's")):
        machine.add_argument(f"--checkpoint-{where}memory", metavar="MB", type=within(int, 0, 2**31 - 1),
                             help=f"{'host' if where else 'card'} memory for saved states, so that later prompts need "
                                  f"not read again what they share with earlier ones (default: {default})")
    machine.add_argument("--products", choices=WISHES, default="auto",
                         help="what multiplies the rows of prompts: dp4a, or tensor cores, with the same results; auto "
                              "measures both on each card and takes the faster one for each size (default: auto)")
    machine.add_argument("--memory", metavar="GB", type=within(float, 0, 1e6),
                         help="memory of each card that may be taken, for weights, keys and values, states and "
                              "workspaces together; what the driver itself needs comes on top (default: all that is "
                              "free)")
    machine.add_argument("--expert-memory", metavar="GB", type=within(float, 0, 1e6),
                         help="memory of each card for the experts of a mixture of experts; all of them then lie in "
                              "host memory, and those that the card lacks are read over the link (default: for all, "
                              "or for as many as fit)")


def option_name(name: str) -> str:
    return "-p" if name == "prompt" else "--" + name.replace("_", "-")


def given(parser: Parser, options) -> list[str]:
    """The names of the options that the command line set."""
    return [name for name, value in vars(options).items() if value != parser.get_default(name)]


def check_options(parser: Parser, options):
    """Leaves with a sentence where an option would do nothing."""
    names = given(parser, options)
    for name in names:
        partners = GOES_WITH.get(name)
        if partners and not set(partners) & set(names):
            parser.error(f"{option_name(name)} goes with {' or '.join(map(option_name, partners))}")
    if options.bench and options.draft == "auto":
        parser.error("--draft auto is not for --bench, which drafts as many tokens as --draft N says")
    if options.acceptance is not None and not options.draft:
        parser.error("--acceptance is for the drafts of --draft N")
    if max(options.check_widths or [1]) > CHECK_ROWS:
        parser.error(f"--check-widths: a step has 1 to {CHECK_ROWS} rows for each answer")
    if options.bench and options.ctx is not None:
        parser.error("--ctx is not for --bench, which takes what --prompt-lengths and --contexts need")
    if options.trace and len(options.cards or ()) > 1:
        parser.error("--trace holds one run: name one number of --cards")
    if options.split and set(options.cards or ()) - {len(options.split)}:
        parser.error("--split names the layers of each card: give --cards that number of cards alone")
    if options.split and (options.probe or options.print_config):
        parser.error("--split is for what loads a model, and for --plan")
    if options.probe and options.model != limits.DEFAULT_MODEL:
        parser.error("-m is not for --probe, which uses no model")
    if options.thinking and "enable_thinking" in (options.chat_template_kwargs or {}):
        parser.error("--thinking and 'enable_thinking' in --chat-template-kwargs say the same: give one of them")
    for name in "system", "thinking", "thinking_budget", "chat_template_kwargs", "image":
        if options.raw and name in names:
            parser.error(f"{option_name(name)} is for chat templates, and --raw uses none")
    for name in ("go_on", "trace", "embedding_model", "reranking_model"):
        if options.ray and getattr(options, name):
            parser.error(f"{option_name(name)} is not for --ray, which has each model on replicas: -m NAME=FILE names "
                         "further ones" if name.endswith("model") else f"{option_name(name)} is not for --ray")
    if options.replicas == (0, 0) and (options.ray == "local" or options.models):
        parser.error("--replicas 0 ends the replicas of all models, on a cluster that runs: it takes no -m, and no "
                     "--ray local")
    if bool(options.tls_cert) != bool(options.tls_key):
        parser.error("--tls-cert and --tls-key go together")
    if not all(each.source for each in options.models):
        parser.error("-m names no model: a GGUF file, or synthetic:tiny")
    check_models(parser, options)
