"""Anonymisation: texts that the rules mask, leave alone, or flag."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from cli import main
from models.curation.anonymize import Anonymize, mask
from models.curation.synthesize import PASSAGE_CHARACTERS
from tests.support.curation import read_out, report_in, write_lines
from tests.support.grading_server import grading_server


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("姓名：张三丰，男，45岁", "姓名：[姓名]，男，45岁"),
        ("患者李某某，女，因头痛入院", "患者[姓名]，女，因头痛入院"),
        ("患者：高明 男", "患者：[姓名] 男"),
        ("患者张三电话13800138000", "患者[姓名]电话[电话]"),
        ("患者张三13800138000", "患者[姓名][电话]"),
        ("联系人：李四手机13800138000", "联系人：[姓名]手机[电话]"),
        ("患儿王小明5岁，发热", "患儿[姓名]5岁，发热"),
        ("姓名：赵六家住幸福小区3号楼201室", "姓名：[姓名]家住[地址]"),
        ("我找王建国主任医师看过，后来是刘医生", "我找[姓名]主任医师看过，后来是[姓名]医生"),
        ("医师签名：何洁", "医师签名：[姓名]"),
        ("Patient name: Mary Jane Doe, seen by Dr. Smith", "Patient name: [NAME], seen by Dr. [NAME]"),
        ("身份证11010519491231002X。", "身份证[证件号]。"),
        ("证件 11010519491231002X", "证件 [证件号]"),
        ("电话13812345678或010-62345678", "电话[电话]或[电话]"),
        ("拨打400-820-8820，手机: 138 1234 5678", "拨打[电话]，手机: [电话]"),
        ("Call 1-800-555-0199 or (212) 555-0100.", "Call [PHONE] or [PHONE]."),
        ("住院号：ZY0012345，床号：12床", "住院号：[病历号]，床号：[病历号]"),
        ("MRN: 00123-45", "MRN: [RECORD]"),
        ("加微信号abc_12345咨询", "加微信号[账号]咨询"),
        ("邮箱 li.si@example.com.cn", "邮箱 [邮箱]"),
        ("家庭住址：幸福小区3号楼201室，已婚", "家庭住址：[地址]，已婚"),
        ("浙江省杭州市西湖区文三路100号就诊", "[地址]就诊"),
    ],
)
def test_personal_data_is_masked(text: str, expected: str) -> None:
    assert mask(text, Counter()) == expected


@pytest.mark.parametrize(
    "text",
    [
        "患者高热，咳嗽三天", "由于医生建议休息", "任何医生都会说", "全科医生和主治医生", "患者常规检查",
        "患者张口2cm，受限", "患者马上住院",
        "血压140/90mmHg，白细胞 12.5×10^9/L", "2013-2018年共1380000例", "每周医生查房", "北京市海淀区有医院",
        "Name the drug; Dr is short for doctor.", "p = 0.13812345678", "谢谢您了大夫", "课程的教授方式",
        "Object name: Resolve Use Name",
    ],
)  # fmt: skip
def test_medical_texts_are_not_masked(text: str) -> None:
    assert mask(text, Counter()) == text


def test_a_number_with_a_wrong_check_digit_is_flagged_but_not_masked() -> None:
    row = {"query": "甲", "pos": ["编号110105194912310021的人"], "neg": ["电话13812345678"]}
    (made,) = Anonymize().apply(iter([row]))
    assert list(made.rows) == [{**row, "neg": ["电话[电话]"]}]
    assert made.notes == {"phone masked": 1}
    assert made.flags == {"7 or more digits in a run are left": "编号110105194912310021的人"}
    (dropped,) = Anonymize(drop_residual=True).apply(iter([row]))
    assert dropped.dropped == "7 or more digits in a run are left"
    (other,) = Anonymize(residual=19).apply(iter([row]))
    assert not other.flags


def test_a_model_finds_what_the_rules_miss_and_reads_masked_texts(tmp_path: Path) -> None:
    long = "甲" * PASSAGE_CHARACTERS + "欧阳小雨来诊"
    rows = [
        {"text": "小雨说头痛，电话13812345678", "title": "欧阳小雨的病"},
        {"query": "头痛", "pos": ["多休息"], "neg": [long]},
        {"text": "答非所问"},
    ]

    def respond(model: str, prompt: str, number: int) -> str:
        text = prompt.rpartition("文字：\n")[2]
        if "答非所问" in text:
            return "没有"
        found = [name for name in ("欧阳小雨", "小雨") if name in text]
        return json.dumps({"personal": [*found, "雨", "姓名", "电话", "没有的人"]})

    with grading_server() as server:
        server.respond = respond
        given = ["curate", "anonymize", str(write_lines(tmp_path / "rows.jsonl", rows))]
        assert main([*given, "--out", str(tmp_path / "out.jsonl"), "--model", f"m@{server.url}"]) == 0
    assert read_out(tmp_path) == [
        {"text": "[姓名]说头痛，电话[电话]", "title": "[姓名]的病"},
        {"query": "头痛", "pos": ["多休息"], "neg": ["甲" * PASSAGE_CHARACTERS + "[姓名]来诊"]},
    ]
    report = report_in(tmp_path)
    assert report["dropped"] == {"no usable answer": 1}
    assert (report["notes"]["masked by a model"], report["notes"]["phone masked"]) == (3, 1)
    assert not any("13812345678" in prompt for _, prompt in server.asked)


@pytest.mark.timeout(60)  # took quadratic time before: a day
@pytest.mark.parametrize("piece", ["a", "020-"])
def test_a_long_text_without_punctuation_takes_linear_time(piece: str) -> None:
    assert mask(piece * 1_000_000, Counter()) == piece * 1_000_000
