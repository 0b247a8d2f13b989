"""The languages of a corpus, and how each splits a line of text into sentences."""

from collections.abc import Iterable, Iterator
import re

from bert_jax.errors import require

# ISO 639-1, and the three-letter codes for which sentencex has a rule (Wikimedia's
# fallbacks). sentencex has no public list. It silently treats an unknown code, such as
# 'german', as English.
_CODES = (
    'aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr '
    'cs cu cv cy da de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu '
    'gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk '
    'kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms '
    'mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro '
    'ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw ta te tg th ti tk '
    'tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu aae abs ace '
    'acm ady aeb aln als alt ami anp apc arn arq ary arz ast atj avk awa azb ban bar '
    'bat bbc bcc bci bdr bew bgn bjn blk bpy bqi btm bug bxr cbk crh csb dsb dtp dty '
    'dua egl eml ext fit fiu fon frc frp frr fur gag gan gcf gcr gld glk gom gor gsw '
    'guc hak hif hke hrx hsb hsn hyw iba ike inh jut kaa kab kbd kbp kea kge khw kiu '
    'kjh kjp koi krc krl ksh ksw kum lad lbe lez lij liv ljp lki lld lmo lrc ltg lua '
    'luz lzh lzz mad mag mai map mdf mhr min mnc mnw mrj mui mwl myv mzn nah nap nds '
    'nia nrm nyo olo pcd pdc pdt pfl pms pnt pwn qug rgn rmy roa rsk rue rup ruq rut '
    'sah scn sdc sdh ses sgs shi shy sjd skr sli sma smn srn sro stq sty szl szy tay '
    'tcy tet trv ttj tyv udm vec vep vls vmf vmw vot vro wls wuu xal xmf yue')
# sentencex 1.0 panics at a single capital before multi-byte white space and a period; in
# Kazakh also if another period follows the capital. Only this white space is replaced, so
# that all other text is split as before.
_PANIC = re.compile(r'(?<![^\s./])[A-Z][\s.]*(?=\.)')
_WIDE_SPACE = re.compile(r'[^\S\x00-\x7f]')


def check(name: str, language: str):
  """Raises UserError unless `language` is a known code, such as zh or zh-cn."""
  require(language.partition('-')[0] in _CODES.split(),
          f'{name}={language!r} is not a language code: give an ISO 639 code, such as '
          'en, de, zh')


def sentences(lines: Iterable[str], language: str) -> Iterator[str]:
  """Splits lines into sentences with sentencex (Wikimedia's rules for 200 languages)."""
  import sentencex  # training on token records does not need it
  code = language.partition('-')[0]  # sentencex splits fr-ca as English
  for line in filter(None, lines):
    start, spaced = 0, line
    if not line.isascii():
      spaced = _PANIC.sub(lambda match: _WIDE_SPACE.sub(' ', match[0]), line)
    for sentence in sentencex.segment(code, spaced):
      yield line[start:start + len(sentence)]
      start += len(sentence)
