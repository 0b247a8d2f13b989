"""sentencepiece.bpe.model of XLM-R and CamemBERT: SentencePiece with fairseq's own ids.

fairseq put its special tokens before the pieces, and <mask> after them (Conneau et al. 2020,
https://arxiv.org/abs/1911.02116; Martin et al. 2020, https://arxiv.org/abs/1911.03894).
"""

import json

from etils import epath
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from bert_jax.data import spiece
from bert_jax.data.bpe import JsonTokenizer
from bert_jax.data.tokenizer_base import CONFIG, SPACE
from bert_jax.errors import require
from bert_jax.runtime import storage

FILE = 'sentencepiece.bpe.model'
_PIECES = ['<unk>', '<s>', '</s>']  # with which every such model begins

Pieces = list[tuple[str, float]]  # pieces and their log probabilities


def _is_camembert(directory: epath.Path) -> bool:
  fields = [storage.read_json_if_any(directory / name) for name in ('config.json', CONFIG)]
  names = fields[0].get('model_type'), fields[1].get('tokenizer_class')
  return any(str(name).lower().startswith('camembert') for name in names)


def _with_offset(pieces: Pieces, is_camembert: bool) -> tuple[Pieces, list[str]]:
  """All entries, and the names of the special ones but <mask>."""
  if is_camembert:  # it met <s>, </s> and <unk> as pieces too; the first two it uses there
    first = [('<s>NOTUSED', 0.0), ('<pad>', 0.0), ('</s>NOTUSED', 0.0), ('<unk>', 0.0),
             ('<unk>NOTUSED', -100.0)]
    entries, special = [*first, *pieces[1:]], [*(name for name, _ in first), '<s>', '</s>']
  else:
    special = ['<s>', '<pad>', '</s>', '<unk>']
    entries = [*((name, 0.0) for name in special), *pieces[3:]]
  return [*entries, ('<mask>', 0.0)], special


def load(path: epath.Path) -> JsonTokenizer:
  """Reads a model file; config.json and tokenizer_config.json beside it tell whose it is.

  Raises:
    UserError: the file is no unigram model of fairseq's kind.
  """
  model, processor = spiece.read_model(path)
  normalization = spiece.character_map(model)
  pieces = [(processor.id_to_piece(i), processor.get_score(i))
            for i in range(processor.get_piece_size())]
  require(normalization is not None and [piece for piece, _ in pieces[:3]] == _PIECES,
          f'{path} is no unigram model that begins with {", ".join(_PIECES)}, as XLM-R and '
          'CamemBERT have it: name a model of another kind spiece.model')
  entries, special = _with_offset(pieces, _is_camembert(path.parent))
  complete = tokenizers.Tokenizer(tokenizers.models.Unigram(entries, special.index('<unk>'), False))
  if normalization:
    complete.normalizer = normalizers.Precompiled(normalization)
  complete.pre_tokenizer = pre_tokenizers.Sequence(
      [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, 'always')])
  complete.decoder = tokenizers.decoders.Metaspace(SPACE, 'always')
  complete.add_special_tokens(special)
  complete.add_special_tokens([tokenizers.AddedToken('<mask>', lstrip=True, special=True)])
  complete.post_processor = tokenizers.processors.TemplateProcessing(
      single='<s> $A </s>', pair='<s> $A </s> </s> $B </s>',
      special_tokens=[(name, complete.token_to_id(name)) for name in ('<s>', '</s>')])
  return JsonTokenizer(json.loads(complete.to_str()), path)
