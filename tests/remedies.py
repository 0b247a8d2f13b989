r"""The remedies that the lines of tests/mistakes.md name, as changes of the commands.

A remedy is one line of changes: NAME=VALUE sets a field of the config, --NAME=VALUE another flag,
~NAME removes a flag. `COMMAND; CHANGES` runs a command of bert_jax first, `!COMMAND; CHANGES` a
shell command. The changed command must end with status 0. With `? ` before the changes it must only
pass the check that failed; another error may follow. \1, \2 and so on are groups of the pattern.
"""

import itertools
import re
import shlex
from typing import NamedTuple

# (pattern of the line, its remedies). The first pattern that fits counts.
RULES = (
    # ---- flags ----------------------------------------------------------------------------------
    (r'give both --config=', '--config=tiny.py --workdir=new'),
    (r'--workdir is empty', '--workdir=new'),
    (r'--config=(nowhere|broken|nothing)\.py', '--config=tiny.py'),
    (r'--config=tinny is not a file .* the configs are .*\btiny\b', '--config=tiny'),
    (r"unexpected argument '(\w+)': write flags as --name=value", r'~\1'),
    (r"Unknown command line flag '(\w+)'. Did you mean: (\w+) \?", r'~--\1 --\2=tiny.py'),
    (r'.*--config\.masking\.max_pred: did you mean --config\.(\S+)\?',
     r'~masking.max_pred ~model.rate \1=9'),
    (r'.*--config\.batch_siz: did you mean --config\.(\S+)\?', r'~batch_siz \1=8'),
    (r'unknown config field --config\.(\S+): did you mean --config\.(\S+)\?', r'~\1 \2=0.5'),
    (r'--config\.(\w+) is a group: give one of its fields', r'~\1 \1.name=lamb'),
    (r'flag --config\.(\S+)=.*: give a whole number', r'\1=8'),
    (r'flag --config\.(\S+)=.*: give true or false', r'\1=true', r'\1=false'),
    (r'flag --config\.(\S+)=.* is not a list: give a,b,c', r'\1=no,yes'),
    # ---- numbers --------------------------------------------------------------------------------
    (r'train_steps=-1 must not be negative', 'train_steps=1'),
    (r'(\S+)=\S+ must not be negative', r'\1=0'),
    (r'(\S+)=\S+ must be at least (\d+)$', r'\1=\2'),
    (r'(\S+)=\S+ must be at most (\d+)$', r'\1=\2'),
    (r'(\S+)=\S+ must be a finite number', r'\1=0.5'),
    (r'(\S+)=\S+ must be positive', r'\1=0.5'),
    (r'(\S+)=\S+ must have a magnitude from (\S+) to (\S+),', r'\1=\2', r'\1=\3'),
    (r'(--\S+)=\S+ must lie in [\[(]0, 1', r'? \1=0.5'),
    (r'(\S+)=\S+ must lie in [\[(]0, 1', r'\1=0.5'),
    (r'--rates=high: give numbers', '? --rates=1e-3'),
    (r'keep_every=3 is not a multiple of .*\. Give (keep_every=4), or another multiple', r'\1',
     'keep_every=8'),
    (r'layers is empty: give one layer at least, such as (\S+)$', r'--layers=\1'),
    # ---- the length of a run, its rows and mesh -------------------------------------------------
    (r'the run has no length: give one of train_steps, train_epochs, train_minutes',
     'train_steps=3 ~train_epochs', 'train_epochs=1', 'train_minutes=1'),
    (r'.*: give one of train_steps, train_epochs, train_minutes and set the others to 0',
     'train_steps=9 train_epochs=0 train_minutes=0', 'train_steps=0 train_epochs=1 train_minutes=0',
     'train_steps=0 train_epochs=0 train_minutes=1'),
    (r'train_epochs=.*: the mixture .*: give train_steps', 'train_steps=3 ~train_epochs'),
    (r'no two neighboring sentences fit into a row of 8.* Raise max_len, or give (\S+)$',
     'max_len=32', r'\1'),
    (r'max_len=4 is too short .*: give at least (\d+)', r'max_len=\1'),
    (r'max_len=\S+ is above model.max_positions=(\d+)', r'max_len=\1'),
    (r"--config\.(\w+) has no effect here: phases=.*: change .* also give --config\.(phases='.*')$",
     r'\2', r"~\1 phases='((9,64,8),(1,64,8))'"),
    (r"phases=.*: each phase is three positive integers \(.*\), as in ('.*')$", r'phases=\1'),
    (r'phases=.*: the steps sum to \d+, .*: give fewer', "phases='((12,32,8),)'"),
    (r'mesh 1x3x1 .* does not fit the (\d) devices', r'mesh.data=\1', 'mesh.data=-1'),
    (r'mesh 1x-1x0 .*: sizes are positive', 'mesh.model=1'),
    (r'model.num_heads=(\d) is not divisible by mesh.model=8', r'mesh.model=\1 mesh.data=2'),
    (r'batch_size=\d+ is not divisible by (\d+) .*: choose a multiple', r'batch_size=\1'),
    (r'optimizer.warmup_steps=12 leaves nothing of the 12 .*: make the run longer or the warmup',
     'train_steps=13', 'optimizer.warmup_steps=11'),
    (r'profile_steps=.*: give (\d+,\d+)$', r'profile_steps=\1'),
    (r'profile_steps=.* last step to trace, (\S+) say', r'profile_steps=\1'),
    (r'--config.profile_steps has no effect here: the run has 12 steps', 'profile_steps=5,6',
     'train_steps=60'),
    # ---- choices: every named choice passes the check -------------------------------------------
    (r'--to=torch is unknown: use .*(bert_jax)', r'--to=\1'),
    (r'(--opset)=17 must lie in \[(18)', r'\1=\2'),
    (r'--quantize has no effect here: it is for (--to=onnx)', r'\1', r'~--quantize'),
    (r'(--most_lost) has no effect here: it is for (--quantize=int8)', r'~\1', r'\2'),
    (r'(--opset) has no effect here: it is for (--to=onnx)', r'~\1', r'\2'),
    (r'--task=translate is unknown: use (?P<choices>[\w, -]+)',
     r'? --task=\g<choice> --input=texts.jsonl'),
    (r'(--suite)=\S+ is unknown: use (?P<choices>[\w, -]+)', r'? \1=\g<choice>'),
    (r"pooling='median' is unknown: use (?P<choices>[\w, -]+)",
     r'? --pooling=\g<choice> --output=new.npy'),
    (r"(--\w+)=\S+ is unknown: use \w+:\w+, .* or (local)$", r'\1=\2'),
    (r'give (--task), one of .*\b(fill_mask)\b', r'\1=\2 --model=run --input=texts.jsonl'),
    (r"data.format='jsonl' is unknown: use (squad)$", r'data.format=\1'),
    (r"the field in (data.eval_fields)='long' is unknown: use (?P<choices>[\w, ]+)",
     r'? \1=\g<choice>=text'),
    (r"(\S+)='\S+' is unknown: (?:use|the GLUE tasks are) (?P<choices>[\w, /-]+)",
     r'? \1=\g<choice>'),
    (r'task=token_classification does not fit .*: give the --config of this task',
     '~task --config=configs/token_classification.py init_from=model data.train=tags.conll'),
    (r"platform='gpu' has no device here", 'platform=cpu'),
    # ---- objectives and models ------------------------------------------------------------------
    (r'objective=\S+ does not train on \S+: it needs (\S+)$', r'\1'),
    (r'objective=replaced_tokens is not for .*: use mlm_nsp or mlm or distillation',
     'objective=mlm_nsp', 'objective=mlm', 'objective=distillation teacher=run'),
    (r"objective='distillation' and teacher=''", 'teacher=run', '~objective'),
    (r'--config\.(\S+) has no effect here: model.architecture=(bert|modernbert) has no', r'~\1'),
    (r'model.num_layers=12 is not divisible by model.groups=5', 'model.groups=4'),
    (r'model.hidden_size=30 is not divisible by', 'model.hidden_size=32'),
    (r'model.attention=splash is not available', 'model.attention=auto'),
    (r'sharding=fsdp splits .*: choose another mesh or sharding', 'sharding=dp',
     'mesh.replica=2 mesh.data=4'),
    # ---- fields without effect ------------------------------------------------------------------
    (r'--config\.(\S+) has no effect here: .* leave (?:it|this field) out$', r'~\1'),
    (r'--config\.(data.lowercase) has no effect here: .* determines the case itself', r'~\1'),
    (r'--config\.(\S+) has no effect here: it is for (masking.unit=\w+), but', r'\2', r'~\1'),
    (r'(masking\.\S+)=70 is more than the (32) tokens of a row: give fewer, or 0 for', r'\1=\2',
     r'\1=0'),
    (r'--config\.(\S+) has no effect here: a window .* at most (\d+) tokens .*: give at most',
     r'\1=\2'),
    (r'--config\.(data\.(words)) has no .* token records: give the flag to bert_jax.prepare',
     r'prepare --input=corpus.txt --output=mended --\2=1000; ~\1 data.source=mended'),
    (r'--config\.(data\.(language)) has no .* token records: give the flag to bert_jax.prepare',
     r'prepare --input=corpus.txt --output=mended --\2=zh; ~\1 data.source=mended'),
    (r'--config\.(data\.(heldout)) has no .* token records: give the flag to bert_jax.prepare',
     r'prepare --input=corpus.txt --output=mended --\2=0.2; ~\1 data.source=mended'),
    (r'--config\.(data\.(lowercase)) has no effect .* have their own vocabulary: prepare others',
     r'prepare --input=corpus.txt --output=mended --\2=false; ~\1 data.source=mended'),
    (r'--config\.(model\.(vocab_size)) has no effect .* have their own vocabulary: prepare others',
     r'prepare --input=corpus.txt --output=mended --\2=150; ~\1 data.source=mended'),
    (r'--config.eval_every has no effect .*: no text is held out: give data.heldout, or records',
     'data.heldout=0.1',
     'prepare --input=corpus.txt --output=mended --heldout=0.1; ~data.heldout data.source=mended'),
    (r'--config.data.text_column has no effect here: .* only JSON lines',
     'data.source=other.jsonl', '~data.text_column'),
    (r'--config\.(\S+) has no effect .* is trained, because (\S+)=\S+ is given: leave one of them',
     r'~\1', r'~\2'),
    (r'--config.lora.alpha has no effect here: lora.rank=0 trains', 'lora.rank=2 init_from=run',
     '~lora.alpha'),
    (r'--config.data.long has no effect here: .* is for single texts', '~data.long',
     '~data.text_pair_column'),
    (r'--config.eval_every has no effect here: nothing is evaluated: give data.eval',
     'data.eval=dev.tsv'),
    (r'--config.data.null_threshold has no effect here: every question', '~data.null_threshold'),
    # ---- where a run starts ---------------------------------------------------------------------
    (r'lora.rank=4 freezes a pretrained model: give its folder as init_from', 'init_from=run'),
    (r"lora.targets: 'query' matches no .* it has attention, down, feed_forward, out, qkv, up",
     'lora.targets=attention,down', 'lora.targets=feed_forward', 'lora.targets=out,qkv,up'),
    (r'(reinit_layers)=1 changes parameters that (lora.rank)=4 freezes: give one of them', r'~\1',
     r'~\2'),
    (r'(\S+)=\d is above model.num_layers=(\d)', r'\1=\2'),
    (r'nowhere is not a folder here, and not a name on the Hugging Face hub',
     '!cp -r run nowhere; '),
    (r'add_tokens=words.txt .*: give its folder as init_from',
     '!echo zebra > mended; init_from=run add_tokens=mended'),
    (r'data.train is not set: give the file', 'data.train=train.tsv init_from=model'),
    (r'model.activation is not set: .*, give its folder as init_from',
     'init_from=model max_len=32'),
    (r'init_from=model holds a model with num_heads=(\d), .*: they must be the same',
     r'model.num_heads=\1'),
    (r'keep_best=\S+ is not a score .*: it has loss, mlm_accuracy, (mlm_loss)', r'keep_best=\1'),
    (r'keep_best=\S+ needs held-out text: set data.heldout', 'data.heldout=0.1'),
    # ---- texts and vocabularies -----------------------------------------------------------------
    (r'data.words=10,000,000: the corpus has only 3,988 words', 'data.words=3988'),
    (r"data.source=.*: 'other.txt' has no weight: give each corpus one",
     'data.source=corpus.txt=0.7,run/corpus=0.3'),
    (r'data.source=.*: the weights sum to 0', 'data.source=corpus.txt=1,run/corpus=0'),
    (r"'nowhere.txt' matches no file: give a quoted glob", "--input='corp*.txt'"),
    (r".* matches no file: give a quoted glob", "data.source='corp*.txt'"),
    (r'(data.language|--language)=\S+ is not a language code: .* such as en, de, zh', r'\1=en',
     r'\1=de', r'\1=zh'),
    (r'(empty|blank).txt is empty: remove it or leave it out', 'data.source=corpus.txt'),
    (r"data.source='one.txt' holds one document: .* Put a blank line between documents",
     r"!(cat one.txt; echo; sed 's/only/other/' one.txt) > mended; ? data.source=mended"),
    (r'latin.txt, line 1: invalid UTF-8 .*: convert the file to UTF-8',
     '!iconv -f latin1 -t utf-8 latin.txt > mended; ? data.source=mended'),
    (r"other.jsonl, line 1: it has no 'text': name the field of the text with data.text_column",
     'data.text_column=body'),
    (r'no_mask.txt: the vocabulary has no (\[MASK\]): .*, each on a separate line',
     r"!(cat no_mask.txt; echo '\1') > mended; data.vocab=mended"),
    (r'cased.txt is a cased .* set (data.lowercase=False)', r'\1'),
    # ---- labelled files -------------------------------------------------------------------------
    (r"train.tsv, line 2: no column 'class': the columns are 'text', '(label)', '(value)'",
     r'data.label_column=\1', r'data.label_column=\2'),
    (r".*: the label '\w+' stands for .* with --config\.(\S+), or name every label in data.labels",
     r'\1', 'data.labels=no,yes,nan'),
    (r"scored.csv, line 3: 'rude' is '-1', .*: write one of them, or .* with --config\.(\S+)$",
     r'\1', "!sed 's/-1/1/g' scored.csv > mended.csv; data.train=mended.csv"),
    (r"swapped.conll, line 3: .*: fix the line, or name every tag in data.labels",
     "!sed 's/I-NAME w3/w3 I-NAME/' swapped.conll > mended.conll; data.train=mended.conll",
     'data.labels=O,B-NAME,I-NAME,w3'),
    (r"data.labels=yes,yes: 'yes' is empty or repeated", 'data.labels=no,yes'),
    (r'choice_9.jsonl, line 1: .*: give its number from 0, or its letter',
     """!sed 's/9/1/' choice_9.jsonl > mended.jsonl; data.train=mended.jsonl""",
     """!sed 's/9/"B"/' choice_9.jsonl > mended.jsonl; data.train=mended.jsonl"""),
    (r"short_line.tsv, line 3: no column 'sentence' in this line: complete it",
     r"!sed 's/^1$/1\tw3/' short_line.tsv > mended.tsv; ? data.test=mended.tsv"),
    (r'unnamed_choice.jsonl, line 1: .* have a "label": give one to each choice',
     """!sed 's/{"text": "b"/{"label": "A", "text": "b"/' unnamed_choice.jsonl > mended.jsonl; """
     'data.train=mended.jsonl'),
    # ---- workdirs -------------------------------------------------------------------------------
    (r'run holds .*; give --config\.(\S+) --config\.(\S+) to continue as before, use another '
     r'--workdir, or continue with --config\.(\S+)$', r'\1 \2', '--workdir=new', r'\3'),
    (r'run holds .*; give --config\.(\S+) to continue as before, use another --workdir, or '
     r'continue with --config\.(\S+)$', r'\1', '--workdir=new', r'\2'),
    (r'edited.txt is not the text with which this run began: put that text back, or use another',
     '--workdir=new'),
    (r'run holds a run with .*: that is another run, use another --workdir', '--workdir=new'),
    (r'--workdir=file cannot be written|--workdir=s3', '--workdir=new'),
    # ---- prepare --------------------------------------------------------------------------------
    (r'give both --input=.* and --output=DIR, or --input and --check',
     '--input=corpus.txt --output=new', '--input=corpus.txt --check=true'),
    (r'run/corpus is a folder of token records, not of text: .* give the files of a text',
     '--input=corpus.txt'),
    (r'--vocab_size=3 leaves no room', '--vocab_size=100'),
    (r'give (--vocab)=FILE or (--vocab_size)=N, not both', r'~\1', r'~\2'),
    (r'(--text_column) has no effect here: .* is plain text', r'~\1'),
    (r'(--lowercase) has no effect here: .* already decides about capitals', r'~\1'),
    (r'(--language) has no effect here: (--format)=wikitext says', r'? ~\1', r'~\2'),
    (r'file is a file: use another --output', '--output=new'),
    # ---- convert --------------------------------------------------------------------------------
    (r'give (--input)=DIR, the model to convert', r'\1=model --output=new --to=bert_jax'),
    (r'give (--to), one of (huggingface), (bert_jax)', r'\1=\3 --output=new'),
    (r'--output=run already exists.*: give another --output', '--output=new'),
    (r'--output=one.txt already exists: give another --output, or --overwrite to replace',
     '--output=new.jsonl', '!cp one.txt mended; --output=mended --overwrite=true'),
    # Running main again would train: tests/runs/test_run.py does that.
    (r'hurt/checkpoints/2 is damaged: .* run main again, .* with (--step=1) or (--allow_older) of',
     r'\1', r'\2=true'),
    (r'hurt holds no sound checkpoint of step 2', '--step=1'),
    (r'run has no checkpoint of step 3, but checkpoints/(2), checkpoints/(1)', r'--step=\1',
     r'--step=\2'),
    (r'model is not a workdir: (--step) and --allow_older choose', r'~\1'),
    # ---- predict, evaluate, mine ----------------------------------------------------------------
    (r'give --model=DIR, a workdir', '--model=run --input=texts.jsonl'),
    (r'--long=chunks is for (--task=score), not', r'\1'),
    (r"long='head' is unknown for scores: use (chunks), or leave it out", r'--long=\1', '~--long'),
    (r"(--\w+) has no effect here: it is for (--task=\w+)( or \w+)*$", r'? ~\1', r'? \2'),
    (r'--max_len=100 is above the (\d+) positions', r'--max_len=\1'),
    (r'give --suite, one of .*(masked_lm)', r'? --suite=\1'),
    (r'give --model$', '? --model=model'), (r'give --data$', '? --data=glue'),
    (r'give --output$|--output=new must end in .json', '? --output=new/x.json'),
    (r'(--rate) has no effect here: --suite=minimal_pairs does not use it', r'? ~\1'),
    (r'--max_len=128 must be at least (\d+) and at most the (\d+) positions', r'--max_len=\1',
     r'--max_len=\2'),
    (r'--data=nowhere is not a folder: give one with the folders of GLUE', '? --data=glue'),
    (r'--data=nowhere is not a folder$', '--data=beir'),
    (r'beir/qrels/hopeless.tsv: .* leave its lines out', '--split=test'),
    (r'pooling=none gives no vector of a text: use (cls), (mean) or (max)', r'--pooling=\1',
     r'--pooling=\2', r'--pooling=\3'),
    # tests/evaluation/test_task_scores.py fine-tunes first.
    (r'--model=model has no head .*: fine-tune it first, or give (--task=\S+)$', r'? \1'),
    (r'--fields=text must be FIELD=VALUE,...: (\S+)$', r'? --fields=\1'),
    (r'give (--corpus)$', r'? \1=beir/corpus.jsonl'),
    (r'--ranks=9,2 must be a first rank from 1 on and a last one', '? --ranks=1,1'),
    (r"near.tsv, line 2: no column 'a': the columns are '(query)', '(positive)'",
     r'? --columns=\1,\2'),
    # ---- plan -----------------------------------------------------------------------------------
    (r'--out=/proc/plan.json cannot be written', '--out=new.json'),
    (r'give --config=configs/large.py', '--config=configs/large.py --topology=local'),
    (r'flag (--price)=-1', r'~\1'),
    (r'(--price) has no effect here', r'~\1'),
)

# Lines that only say what is wrong with a file or a model.
NO_REMEDY = re.compile(r"""
    .*(invalid\ JSON|not\ JSON|damaged\ gzip|a\ NUL\ byte|cannot\ be\ read:\ No\ such\ file)
    |.*(holds\ no\ (document|example|pair|text)|holds\ NaN|not\ a\ SentencePiece|names\ __builtin__)
    |.*(nothing\ to\ learn\ from\ one|is\ none\ of\ the|not\ a\ number|a\ word\ without\ a\ tag)
    |.*(is\ not\ in\ SQuAD's\ format|not\ a\ config\ of|holds\ no\ model|one\ of\ bert,)
    |.*(has\ no\ masked-LM\ head|is\ for\ no\ task|no\ \[MASK\]\ in|lacks\ dev.tsv)
    |.*(no\ column\ 'linguistics_term')
    |.*(lacks\ every\ relevant|that\ queries.jsonl\ lacks|with\ the\ text\ '_id'|nothing\ to\ score)
    |vocab_size\ is\ 63""", re.X)


def _changed(command: str, changes: str) -> str:
  """The command with changes; a name without -- is a word of the command or a config field."""
  words = shlex.split(command)
  for change in shlex.split(changes):
    name, equals, value = change.removeprefix('~').partition('=')
    flag = name if name.startswith('--') or name in words else f'--config.{name}'
    words = [word for word in words if word.partition('=')[0] != flag]
    words += [f'{flag}={value}'] * bool(equals)
  return shlex.join(words)


class Remedy(NamedTuple):
  """A remedy that a line names."""

  before: str  # a command to run first, a shell command after '!'; or ''
  command: str
  may_fail_later: bool  # another error may follow


def of(command: str, line: str) -> list[Remedy] | None:
  """The remedies that a line names; None if no rule fits it."""
  for pattern, *remedies in RULES:
    if match := re.match(pattern, line):
      choices = match.groupdict().get('choices', '').split(', ')
      result = []
      for remedy, choice in itertools.product(remedies, choices):
        before, _, changes = match.expand(remedy.replace(r'\g<choice>', choice)).rpartition('; ')
        weak = changes.startswith('? ')
        result.append(Remedy(before, _changed(command, changes.removeprefix('? ')), weak))
      return result
  return [] if NO_REMEDY.match(line) else None
