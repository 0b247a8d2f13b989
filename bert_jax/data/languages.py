"""Language codes for `data.language`.

sentencex has no list of its codes and silently treats an unknown one, such as 'german', as English.
"""

from bert_jax.errors import UserError

# ISO 639-1, and the three-letter codes for which sentencex has a rule (Wikimedia's fallbacks).
_TEXT = (
    'aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy '
    'da de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu '
    'hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb '
    'lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om '
    'or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv '
    'sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu '
    'aae abs ace acm ady aeb aln als alt ami anp apc arn arq ary arz ast atj avk awa azb ban bar '
    'bat bbc bcc bci bdr bew bgn bjn blk bpy bqi btm bug bxr cbk crh csb dsb dtp dty dua egl eml '
    'ext fit fiu fon frc frp frr fur gag gan gcf gcr gld glk gom gor gsw guc hak hif hke hrx hsb '
    'hsn hyw iba ike inh jut kaa kab kbd kbp kea kge khw kiu kjh kjp koi krc krl ksh ksw kum lad '
    'lbe lez lij liv ljp lki lld lmo lrc ltg lua luz lzh lzz mad mag mai map mdf mhr min mnc mnw '
    'mrj mui mwl myv mzn nah nap nds nia nrm nyo olo pcd pdc pdt pfl pms pnt pwn qug rgn rmy roa '
    'rsk rue rup ruq rut sah scn sdc sdh ses sgs shi shy sjd skr sli sma smn srn sro stq sty szl '
    'szy tay tcy tet trv ttj tyv udm vec vep vls vmf vmw vot vro wls wuu xal xmf yue')
_CODES = frozenset(_TEXT.split())


def check(name: str, language: str):
  """Raises UserError if the value of `name` is no code of a language; zh-cn counts as zh."""
  if language.partition('-')[0] not in _CODES:
    raise UserError(f'{name}={language!r} is no code of a language: give that of ISO 639, such as '
                    'en, de, zh')
