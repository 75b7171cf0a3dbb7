// Every sentence of the page, in each language. Functions take the values that a sentence contains.

const zhNumber = new Intl.NumberFormat("zh-CN");
const enNumber = new Intl.NumberFormat("en");
const plural = (count, one, many) => `${enNumber.format(count)} ${count === 1 ? one : many}`;
const pick = (list) => (place) => list[place];
const milliseconds = (value) => value.toFixed(value < 10 ? 2 : 1);

export const strings = {
  zh: {
    languageCode: "zh-CN",
    otherLanguage: "English",
    otherLanguageCode: "en",
    home: "CARE Search 首页",
    skip: "跳到检索结果",
    tools: "工具",
    api: "接口文档",

    heroTitle: "用自己的话提问",
    heroText: "按意思找，按字词找，或者两者一起。每一条结果从哪里来、每一步用了多久，都看得见。",
    queryLabel: "检索医学条目",
    queryHint: "症状、药名，或一句完整的问题",
    search: "检索",
    examplesTitle: "试试这样问",
    example: pick(["血压高应该吃哪种药", "孩子半夜发烧怎么办", "空腹血糖多少算偏高", "被狗咬了先做什么"]),
    facts: (documents, passages) => `当前收录 ${zhNumber.format(documents)} 个条目，共 ${zhNumber.format(passages)} 个段落`,

    mode: "检索方式",
    modeDense: "语义",
    modeLexical: "关键词",
    modeHybrid: "混合",
    hintDense: "比较意思，说法不同也能找到",
    hintLexical: "比较字词，适合药名和术语",
    hintHybrid: "意思与字词一起打分",

    filters: "筛选",
    clearFilters: "清除全部筛选",
    from: "从",
    to: "到",
    moreOptions: (count) => `全部 ${zhNumber.format(count)} 项`,
    fewerOptions: "收起",
    topK: "显示条数",
    explain: "显示名次",
    placing: (rank, score) => `第 ${zhNumber.format(rank)} 名（${score.toFixed(3)}）`,
    noPlacing: "—",
    weight: "语义占比",

    results: "检索结果",
    searching: "正在检索",
    summary: (count, total) => `${zhNumber.format(count)} 条结果，用时 ${milliseconds(total)} 毫秒`,
    truncated: "问题较长，超出编码器长度的部分没有参与检索。把最要紧的话放在前面，或把问题写短一些。",
    score: "得分",
    openText: "展开全文",
    closeText: "收起全文",
    loadingText: "正在读取全文",
    textFailed: "全文没有取到，请再试一次。",

    timings: "各步用时（毫秒）",
    stageValue: (value) => milliseconds(value),
    stage_tokenize: "分词",
    stage_queue: "排队",
    stage_encode: "编码",
    stage_search: "检索",
    stage_fetch: "取文档",
    stage_other: "其他",

    noneTitle: "没有找到条目",
    noneFilters: "下面的筛选条件把结果挡在了外面。去掉一个，再看看：",
    noneLexical: "没有条目含有这些字词。可以换成按意思找：",
    nonePlain: "换一种说法，或者用更常见的词。",
    drop: (name, value) => `${name}：${value}`,
    dropLabel: (name, value) => `去掉筛选“${name}：${value}”`,
    days: (from, to) => (from && to ? `${from} 至 ${to}` : from ? `${from} 起` : `${to} 止`),
    tryDense: "改用语义检索",

    failedTitle: "这次检索没有成功",
    unreachable: "连不上检索服务。请确认服务正在运行、网络可用，然后重试。",
    badAnswer: (status) => `服务给出了无法理解的回答（HTTP ${status}）。请稍后重试。`,
    requestId: "请求编号",
    retry: "重试",

    disclaimer: "这里的条目只是演示用的例子，不构成医疗建议。身体不适请咨询医生；情况紧急请拨打 120。",
    snapshot: (version) => `快照 ${version}`,

    fieldNames: { department: "科室", kind: "类别", language: "语言", updated: "更新日期" },
    valueNames: {
      kind: { disease: "疾病", drug: "药物", test: "检查", "first-aid": "急救" },
      language: { zh: "中文", en: "英文" },
    },
  },

  en: {
    languageCode: "en",
    otherLanguage: "中文",
    otherLanguageCode: "zh-CN",
    home: "CARE Search, start page",
    skip: "Skip to results",
    tools: "Tools",
    api: "API",

    heroTitle: "Ask in your own words",
    heroText: "Search by meaning, by keyword, or both. See where each result comes from and how long each step took.",
    queryLabel: "Search medical entries",
    queryHint: "A symptom, a medicine, or a question",
    search: "Search",
    examplesTitle: "Try asking",
    example: pick([
      "how to take a tick off the skin",
      "fingers turn white in the cold",
      "ringing in the ears",
      "what a finger oxygen clip measures",
    ]),
    facts: (documents, passages) =>
      `The collection holds ${plural(documents, "entry", "entries")} in ${plural(passages, "passage", "passages")}`,

    mode: "How to search",
    modeDense: "Meaning",
    modeLexical: "Keyword",
    modeHybrid: "Both",
    hintDense: "Compares meaning; other wordings are found too",
    hintLexical: "Compares words; good for names and terms",
    hintHybrid: "Scores meaning and words together",

    filters: "Filters",
    clearFilters: "Clear all filters",
    from: "From",
    to: "To",
    moreOptions: (count) => `All ${enNumber.format(count)}`,
    fewerOptions: "Show fewer",
    topK: "Show",
    explain: "Show ranks",
    placing: (rank, score) => `no. ${enNumber.format(rank)} (${score.toFixed(3)})`,
    noPlacing: "—",
    weight: "Share of meaning",

    results: "Results",
    searching: "Searching",
    summary: (count, total) => `${plural(count, "result", "results")} in ${milliseconds(total)} ms`,
    truncated:
      "The question is longer than the encoder reads; its end took no part. Put what matters first, or shorten it.",
    score: "Score",
    openText: "Full text",
    closeText: "Hide full text",
    loadingText: "Loading the full text",
    textFailed: "The full text could not be loaded. Please try again.",

    timings: "Time of each step in milliseconds",
    stageValue: (value) => milliseconds(value),
    stage_tokenize: "Tokenize",
    stage_queue: "Queue",
    stage_encode: "Encode",
    stage_search: "Search",
    stage_fetch: "Fetch",
    stage_other: "Other",

    noneTitle: "Nothing found",
    noneFilters: "These filters keep results out. Drop one and look again:",
    noneLexical: "No entry contains these words. Search by meaning instead:",
    nonePlain: "Try another wording, or more common words.",
    drop: (name, value) => `${name}: ${value}`,
    dropLabel: (name, value) => `Drop the filter ${name}: ${value}`,
    days: (from, to) => (from && to ? `${from} to ${to}` : from ? `from ${from}` : `until ${to}`),
    tryDense: "Search by meaning",

    failedTitle: "This search did not succeed",
    unreachable: "The search service cannot be reached. Check that it is running and that you are online, then retry.",
    badAnswer: (status) => `The service gave an answer that makes no sense (HTTP ${status}). Please retry in a moment.`,
    requestId: "Request id",
    retry: "Retry",

    disclaimer:
      "The entries are examples for demonstration and no medical advice. " +
      "If you feel unwell, ask a doctor; in an emergency call your local emergency number.",
    snapshot: (version) => `Snapshot ${version}`,

    fieldNames: { department: "Department", kind: "Kind", language: "Language", updated: "Updated" },
    valueNames: {
      department: {
        中医科: "Chinese medicine", 儿科: "Paediatrics", 内分泌科: "Endocrinology", 口腔科: "Dentistry",
        呼吸内科: "Respiratory", 妇产科: "Obstetrics & gynaecology", 心血管内科: "Cardiology", 急诊科: "Emergency",
        感染科: "Infectious diseases", 普外科: "General surgery", 泌尿外科: "Urology", 消化内科: "Gastroenterology",
        皮肤科: "Dermatology", 眼科: "Eye", 神经内科: "Neurology", 精神心理科: "Mental health", 耳鼻喉科: "Ear, nose & throat",
        肾内科: "Nephrology", 肿瘤科: "Oncology", 血液科: "Haematology", 风湿免疫科: "Rheumatology", 骨科: "Orthopaedics",
      },
      kind: { disease: "Disease", drug: "Drug", test: "Test", "first-aid": "First aid" },
      language: { zh: "Chinese", en: "English" },
    },
  },
};
