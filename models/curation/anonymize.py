"""Masks what names a person, by rules: names after cues, phones, identity and record numbers, addresses, e-mails.

Rules miss what no cue announces. Long runs of digits that are left are flagged, and `--sample` writes rows before and
after for a person to read; the report and the sample therefore hold personal data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from models.curation.frame import Outcome, Step
from models.curation.rows import Row, with_texts

RESIDUAL_DIGITS = 7
_EXCERPT = 20
_CHINESE = re.compile(r"[\u3400-\u9fff]")
# Surnames that seldom begin another word, and those that often do: 高热 and 方法 are not names.
_CLEAR = (
    "王李张刘陈杨赵吴徐孙朱马胡郭林罗梁宋郑韩唐冯董萧曹袁邓傅沈彭吕苏卢蒋蔡贾丁魏薛潘"
    "杜戴钟汪田范谭廖邹熊陆郝邱秦侯邵孟龙阎崔赖龚庞樊殷施翁倪庄耿聂"
)
_UNCLEAR = "高黄何许曾于余叶白常方严温左向时任史毛万段金石姜夏江钱周顾易武康贺雷汤黎文牛鲁韦俞葛岳齐洪安谢程"
_SURNAME = f"(?:欧阳|司马|上官|诸葛|[{_CLEAR}])"
_ANY_SURNAME = f"(?:欧阳|司马|上官|诸葛|[{_CLEAR}{_UNCLEAR}])"
_HAN = r"[\u4e00-\u9fff]"
_GIVEN = r"(?![的了您你我他她是和与及就给对在有等])[\u4e00-\u9fff]"
# Numbers and addresses are masked before names, so what follows a name may be a placeholder.
_ENDS = r"(?=$|[\s，,。；;、：:（）()/|\[]|男|女|先生|女士|的|于|因|今|电话|手机|身份证|住址|家住|年龄|性别|\d{1,3}岁)"
_LABEL = r"(?:患者|病人|病患|患儿|产妇|家属|联系人|监护人|医生|医师|大夫|护士|主任|教授|签名|签字)"
_TITLES = r"(?=(?:主任|副主任|主治)?(?:医生|医师|大夫|教授|护士长?))"


def _id_is_valid(match: re.Match[str]) -> bool:
    """Returns whether the check digit of a Chinese identity number (GB 11643) is right."""
    number = match.group().upper()
    total = sum(int(digit) * pow(2, 17 - place, 11) for place, digit in enumerate(number[:17]))
    return "10X98765432"[total % 11] == number[17]


@dataclass(frozen=True, slots=True)
class Rule:
    """What is masked: the group `what` of a pattern, or all of it, if `holds`; (?i) ignores case."""

    kind: str
    pattern: re.Pattern[str]
    holds: Callable[[re.Match[str]], bool] = lambda match: True


PLACEHOLDERS = {
    "e-mail": ("[邮箱]", "[EMAIL]"), "identity number": ("[证件号]", "[ID]"), "record number": ("[病历号]", "[RECORD]"),
    "phone": ("[电话]", "[PHONE]"), "account": ("[账号]", "[ACCOUNT]"), "address": ("[地址]", "[ADDRESS]"),
    "name": ("[姓名]", "[NAME]"),
}  # fmt: skip
"""What stands for each kind in Chinese and in other texts."""
_DATE = r"(?:18|19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
_ROAD = r"(?:路|街|道|巷|镇|乡|村)"
_IS = r"\s*[:：为是#]?\s*"
_PATTERNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # Begins where no other letter stands before it: otherwise a long text of letters takes the square of its length.
    ("e-mail", (r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",)),
    ("identity number", (
        rf"(?:身份证|护照|社保卡?|医保卡?)(?:号码?)?{_IS}(?P<what>[A-Za-z]{{0,2}}\d{{6,17}}[\dXx])",
    )),
    ("record number", (
        rf"(?:住院|门诊|病历|病案|就诊卡?|登记|检查|标本|条码|病理)号码?{_IS}(?P<what>[A-Za-z]{{0,4}}-?\d[\dA-Za-z-]{{2,}})",
        r"(?i)\b(?:MRN|(?:medical )?record (?:no\.?|number)|patient id)\s*[:#]?\s*(?P<what>[A-Z]{0,4}-?\d[\dA-Z-]{2,})",
        rf"床号{_IS}(?P<what>[A-Za-z]?\d{{1,4}}床?)",
    )),
    ("phone", (
        r"(?<![\d.])(?:\+?86[- ]?)?1[3-9]\d[- ]?\d{4}[- ]?\d{4}(?!\.?\d)",
        r"(?<![\d-])(?:0\d{2,3}[- ]\d{7,8}|[48]00-\d{3,4}-\d{3,4}|\(0\d{2,3}\) ?\d{7,8})(?:-\d{1,5})?(?!\d)",
        r"(?<![\d-])(?:\+?1[-. ])?(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[-.])\d{3}[-.]\d{4}(?![\d-])",
        r"(?i)(?:电话|手机|热线|tel|phone)(?:号码?)?\s*[:：]\s*(?P<what>\+?\d[\d -]{5,}\d)",
    )),
    ("account", (rf"(?i)(?:QQ群?|微信|wechat|weixin)(?:号码?)?{_IS}(?P<what>[A-Za-z0-9_-]{{5,20}})",)),
    ("address", (
        r"(?:住址|地址|住所|家住|现住)\s*[:：]?\s*"
        r"(?P<what>[\u4e00-\u9fffA-Za-z0-9#-]{2,40}(?:号楼?|室|栋|单元|村|镇|乡|街|路|组|区|县|市))",
        rf"(?:{_HAN}{{2,7}}(?:省|自治区))?{_HAN}{{2,7}}市{_HAN}{{1,8}}(?:区|县){_HAN}{{1,12}}{_ROAD}\d+[号弄栋组]?"
        rf"(?:{_HAN}{{0,6}}\d+[号室栋])*",
        r"(?i)\baddress\s*:\s*(?P<what>[^\n;]{5,80})",
    )),
    ("name", (
        rf"(?:姓\s?名|名\s?字)\s*[:：]\s*(?P<what>{_HAN}{{2,4}}?(?:·{_HAN}{{1,6}})?){_ENDS}",
        rf"{_LABEL}(?:姓名)?\s*[:：]\s*(?P<what>{_ANY_SURNAME}{_HAN}{{1,2}}?){_ENDS}",
        rf"(?:患者|病人|患儿)\s?(?P<what>{_SURNAME}(?:某+|{_HAN}{{1,2}}?)){_ENDS}",
        rf"(?P<what>{_SURNAME}{_GIVEN}{{0,2}}?){_TITLES}",
        r"\b(?:(?:(?i:patient(?:'s)? name)|(?<![a-z] )Name)\s*:|(?:Dr|Mr|Mrs|Ms|Prof)\.?)\s+"
        r"(?P<what>[A-Z][a-z'-]+(?:\s+[A-Z](?:\.|[a-z'-]+)){0,2})",
    )),
)  # fmt: skip
RULES = (
    Rule(
        "identity number", re.compile(rf"(?<!\w)[1-9]\d{{5}}{_DATE}\d{{3}}[\dXx](?![\dA-Za-z])", re.ASCII), _id_is_valid
    ),
    *(Rule(kind, re.compile(pattern)) for kind, patterns in _PATTERNS for pattern in patterns),
)


@dataclass(frozen=True)
class Anonymize(Step):
    """Flags rows in which `residual` digits or more are left in a run; `drop_residual` drops them."""

    residual: int = RESIDUAL_DIGITS
    drop_residual: bool = False

    name = "anonymize"
    version = 2

    def parameters(self) -> dict[str, Any]:
        return {"residual": self.residual, "drop_residual": self.drop_residual}

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        return map(self.mask_row, rows)

    def mask_row(self, row: Row) -> Outcome:
        notes, left = Counter[str](), list[str]()
        run = re.compile(rf"\d(?:[ -]?\d){{{self.residual - 1},}}")

        def change(text: str) -> str:
            masked = mask(text, notes)
            left.extend(
                masked[max(0, found.start() - _EXCERPT) : found.end() + _EXCERPT] for found in run.finditer(masked)
            )
            return masked

        changed = with_texts(row, change)
        if not left:
            return Outcome([changed], notes=notes)
        reason = f"{self.residual} or more digits in a run are left"
        if self.drop_residual:
            return Outcome(dropped=reason)
        return Outcome([changed], notes=notes, flags={reason: left[0]})


def mask(text: str, notes: Counter[str]) -> str:
    """The text with everything masked that a rule finds; counts in `notes` by kind."""
    chinese = bool(_CHINESE.search(text))
    for rule in RULES:
        placeholder = PLACEHOLDERS[rule.kind][0 if chinese else 1]

        def replace(match: re.Match[str], rule: Rule = rule, placeholder: str = placeholder) -> str:
            if not rule.holds(match):
                return match.group()
            notes[f"{rule.kind} masked"] += 1
            group = "what" if "what" in rule.pattern.groupindex else 0
            first, end = (place - match.start() for place in match.span(group))
            return match.group()[:first] + placeholder + match.group()[end:]

        text = rule.pattern.sub(replace, text)
    return text
