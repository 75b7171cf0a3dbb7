"""Compares an exported graph with its reference on the check texts, and refuses it below its floor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Parity, Variant
from models.errors import ParityError

Vectors = NDArray[np.float32]

TOP = 10


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that a graph must reach to be kept: mean and worst cosine, mean share of the reference's top 10."""

    cosine: float
    worst_cosine: float
    top10_overlap: float


# fp32 differs by the order of sums only, so anything below is a defect. fp16 keeps ten bits: real encoders lose less
# than 0.0001. int8 is a trade: bge-small reaches 0.997, and below 0.99 nDCG@10 falls by more than half a point.
FLOORS: Mapping[Variant, Floor] = {
    Variant.FP32: Floor(cosine=0.9999, worst_cosine=0.9995, top10_overlap=0.99),
    Variant.FP16: Floor(cosine=0.999, worst_cosine=0.995, top10_overlap=0.97),
    Variant.INT8: Floor(cosine=0.99, worst_cosine=0.97, top10_overlap=0.88),
}


def check_parity(folder: Path, variant: Variant, reference: Vectors, floor: Floor) -> Parity:
    """The parity of one graph of an encoder folder with the reference's vectors of the check texts, or ParityError."""
    gpu = variant is Variant.FP16 and "CUDAExecutionProvider" in ort.get_available_providers()
    encoder = OnnxEncoder.load(folder, variant, device="cuda" if gpu else "cpu")
    vectors = encoder.encode(CHECK_TEXTS, encoder.spec.sides[0])
    cosines = row_cosines(vectors, reference)
    mean, worst = round(float(cosines.mean()), 6), float(cosines.min())
    parity = Parity(cosine=mean, top10_overlap=round(top_overlap(vectors, reference), 4), texts=len(CHECK_TEXTS))
    # Written so that a NaN, which compares false with everything, is refused too.
    if not (mean >= floor.cosine and worst >= floor.worst_cosine and parity.top10_overlap >= floor.top10_overlap):
        raise ParityError(
            f"{variant.filename} is not the encoder it was made from: cosine {parity.cosine:.5f} "
            f"(floor {floor.cosine}), worst {worst:.5f} ({floor.worst_cosine}), top-10 overlap "
            f"{parity.top10_overlap:.3f} ({floor.top10_overlap}); leave it out or export by another backend"
        )
    return parity


def row_cosines(vectors: Vectors, reference: Vectors) -> Vectors:
    """The cosine of each row of one with the same row of the other."""
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    cosines: Vectors = (vectors * reference).sum(axis=1) / norms
    return cosines


def top_overlap(vectors: Vectors, reference: Vectors) -> float:
    """Mean share of each text's ten nearest others that stay so when its own vector comes from the exported graph.

    The other side stays the reference: queries are encoded by the served graph, documents were encoded offline.
    """
    expected, found = reference @ reference.T, vectors @ reference.T
    np.fill_diagonal(expected, -np.inf)
    np.fill_diagonal(found, -np.inf)
    pairs = zip(np.argsort(-expected, axis=1)[:, :TOP], np.argsort(-found, axis=1)[:, :TOP], strict=True)
    return float(np.mean([len(np.intersect1d(a, b)) / TOP for a, b in pairs]))


def check_pairs() -> list[tuple[str, str]]:
    """Queries and documents that rerankers are compared on: every question with some passages, of all lengths."""
    passages = [*_PASSAGES, *_LONG]
    return [
        (question, passages[(5 * row + 7 * step) % len(passages)])
        for row, question in enumerate((*_SHORT, *_QUESTIONS))
        for step in range(3)
    ]


_SHORT = (
    "痛", "感冒", "发烧", "高血压", "糖尿病", "fever", "MRI", "阿司匹林", "胃食管反流病", "asthma",
    "房颤抗凝", "HbA1c 7.2%", "孕期贫血", "β受体阻滞剂", "COVID-19",
)  # fmt: skip

_QUESTIONS = (
    "高血压吃什么药比较好？",
    "孩子发烧三十九度需要马上去医院吗",
    "二型糖尿病患者可以吃西瓜吗？",
    "感冒和流感怎么区分",
    "胃镜检查前需要空腹多久",
    "甲状腺结节四级是什么意思，要不要手术",
    "长期服用阿司匹林有哪些副作用？",
    "腰椎间盘突出平时怎么锻炼",
    "头孢和酒为什么不能一起",
    "乙肝两对半一三五阳性说明什么",
    "怀孕六周有少量出血正常吗",
    "体检发现尿酸偏高，饮食上要注意什么？",
    "失眠多梦半年了，吃中药能调理好吗",
    "老人突然口角歪斜、说话不清怎么办",
    "幽门螺杆菌阳性会传染给家人吗",
    "儿童过敏性鼻炎用什么喷雾",
    "心电图提示窦性心律不齐严重吗？",
    "肺部磨玻璃结节多久复查一次",
    "备孕期间可以打狂犬疫苗吗",
    "痛风急性发作时能不能吃别嘌醇？",
    "What is the first-line treatment for type 2 diabetes?",
    "How long should anticoagulation continue after a pulmonary embolism?",
    "Can ibuprofen be taken together with an ACE inhibitor?",
    "symptoms of iron deficiency in toddlers",
    "Which vaccines are recommended during pregnancy?",
    "is metformin safe with an eGFR of 28",
    "difference between viral and bacterial meningitis CSF findings",
    "night sweats and weight loss in a 60 year old smoker",
)

_PASSAGES = (
    "原发性高血压的治疗以改善生活方式为基础，包括限盐、减重、戒烟限酒和规律运动；血压仍不达标者应在医生指导下服用降压药物。",
    "二甲双胍是多数二型糖尿病患者的首选口服降糖药，常见不良反应为恶心、腹泻等胃肠道反应，严重肾功能不全者禁用。",
    "急性阑尾炎的典型表现为转移性右下腹痛，麦氏点压痛、反跳痛阳性，血常规可见白细胞及中性粒细胞升高，确诊后多主张尽早手术。",
    "缺铁性贫血患者可见乏力、面色苍白、匙状甲；实验室检查提示小细胞低色素性贫血，血清铁蛋白降低，总铁结合力升高。",
    "过敏性休克一经发现应立即停用可疑药物，平卧位，肌内注射肾上腺素，保持气道通畅并给予吸氧和补液。",
    "支气管哮喘是由多种细胞参与的气道慢性炎症性疾病，控制治疗首选吸入糖皮质激素，急性发作时按需使用短效支气管扩张剂。",
    "桂枝汤由桂枝、芍药、生姜、大枣、甘草五味组成，功能解肌发表、调和营卫，主治外感风寒表虚证。",
    "慢性肾脏病分期依据肾小球滤过率和尿白蛋白水平，三期以后应注意控制血压、限制蛋白摄入并纠正贫血与钙磷代谢紊乱。",
    "脑卒中发病四个半小时内符合适应证者可静脉溶栓，溶栓前必须行头颅影像检查以排除出血。",
    "骨质疏松症的基础补充剂为钙和维生素D，双膦酸盐类药物可降低椎体和髋部骨折风险，服药后应保持直立位至少三十分钟。",
    "本品为白色片剂，口服，一次一片，一日两次，饭后服用。对本品成分过敏者禁用，孕妇及哺乳期妇女慎用。",
    "患者，男，五十六岁，因反复胸闷气促三月、加重一周入院。既往高血压病史十年，吸烟三十年，每日一包。",
    "Metformin lowers hepatic glucose output and improves insulin sensitivity; lactic acidosis is rare but serious.",
    "Iron deficiency is the most common cause of anaemia worldwide; ferritin below 30 micrograms per litre proves it.",
    "Patients with atrial fibrillation and a CHA2DS2-VASc score of two or more should be offered oral anticoagulation.",
    "Inhaled corticosteroids are the cornerstone of asthma control; long-acting beta agonists must not be used alone.",
    "Randomised trials show that statins reduce major vascular events by about one fifth per mmol/L fall in LDL.",
    "The rash of measles begins on the face and spreads downwards, preceded by cough, coryza and Koplik spots.",
    "早期胃癌多无明显症状，部分患者有上腹不适、反酸、嗳气等非特异表现；内镜下黏膜剥离术适用于无淋巴结转移的病变。",
    "新生儿生理性黄疸多在出生后两至三天出现，足月儿两周内消退；血清胆红素超过光疗参考曲线时应及时蓝光照射。",
)

# Longer than 512 tokens for every tokenizer in use, and of different ends, so that the cut is compared as well.
_LONG = (
    "".join(_PASSAGES[:12]),
    "".join(reversed(_PASSAGES[:12])),
    " ".join(_PASSAGES[12:18]) * 4,
    "".join(_PASSAGES[3:9]) + " ".join(_PASSAGES[12:]) * 2,
)

CHECK_TEXTS: tuple[str, ...] = (*_SHORT, *_QUESTIONS, *_PASSAGES, *_LONG)

CALIBRATION_TEXTS: tuple[str, ...] = (
    "咳",
    "偏头痛",
    "stroke",
    "血常规怎么看",
    "牙龈出血是缺什么维生素？",
    "冠心病支架术后还要吃多久的药",
    "宝宝拉肚子两天了，大便像蛋花汤，需要化验吗",
    "Does caffeine raise blood pressure in the long term?",
    "management of acute gout in chronic kidney disease",
    "慢性胃炎患者应规律饮食，避免辛辣刺激，合并幽门螺杆菌感染者可行根除治疗，四周后复查呼气试验。",
    "肺结核的化疗原则为早期、联合、适量、规律、全程，强化期常用异烟肼、利福平、吡嗪酰胺和乙胺丁醇。",
    "六味地黄丸滋阴补肾，用于肾阴亏损所致的头晕耳鸣、腰膝酸软、骨蒸潮热、盗汗遗精。",
    "Hypothyroidism presents with fatigue, cold intolerance and weight gain; levothyroxine is titrated against TSH.",
    "Deep vein thrombosis is confirmed by compression ultrasound when the pretest probability is not low.",
    "帕金森病以静止性震颤、运动迟缓、肌强直和姿势平衡障碍为主要表现，左旋多巴是最有效的对症药物，长期使用可出现剂末现象和异动症，"
    "需要个体化调整剂量；康复训练、营养支持与心理疏导同样重要，晚期患者可评估脑深部电刺激手术的适应证。",
)
