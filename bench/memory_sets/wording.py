"""Sentences that every conversation shares: orders and appointments as told, and the patterns of the questions.

It knows words only; which slot gets which value is decided by `schedule` and `questions`.
"""

from __future__ import annotations

import datetime as dt

from bench.memory_sets.script import Pair

MONTHS_ZH = "一二三四五六七八九"
MONTHS = tuple(dt.date(2026, month, 1).strftime("%B") for month in range(1, 13))

ORDER_TOLD = (
    Pair(
        "I've ordered {item}. The number is {number}, and it should be here by {date}.",
        "{item}下单了，单号{number}，说是{date}前到。",
    ),
    Pair(
        "For the files: {item}, reference {number}, they promise {date}.",
        "存个档：{item}，编号{number}，商家承诺{date}送达。",
    ),
    Pair(
        "Paid for {item} just now, {number} is what we have to quote. Due {date}.",
        "{item}刚付完款，查件报{number}，预计{date}。",
    ),
    Pair(
        "Confirmation for {item} came in: {number}. Delivery on {date}.",
        "{item}的确认邮件来了：{number}，{date}送货。",
    ),
    Pair(
        "They had {item} after all, so I took it; it runs under {number} and arrives on {date}.",
        "{item}居然有货，我就订了，挂在{number}下面，{date}到。",
    ),
)
ORDER_CHANGED = (
    Pair(
        "The shop lost our booking of {item} and made a new one: {number} replaces the old number.",
        "商家把{item}的单子弄丢了，重开了一张：旧号作废，改用{number}。",
    ),
    Pair(
        "Careful with {item}: they've split the parcel, from today it's tracked as {number} only.",
        "注意，{item}拆包重发了，今天起只认{number}。",
    ),
)
ORDER_CONSIDERED = (
    Pair("Still undecided about {item}, so nothing is ordered yet.", "{item}还在犹豫，先没下单。"),
    Pair("I looked at {item} online and closed the tab again, far too dear.", "网上看了{item}，太贵，又关了。"),
    Pair("Can {item} wait until next year? I think it can.", "{item}明年再说行吗？我看行。"),
)
ORDER_ASKED = (
    Pair("What's the order number for {item}?", "{item}的订单号是多少？"),
    Pair("Which reference do I give when I ask about {item}?", "要查{item}到哪儿了，得报哪个号？"),
)
ORDER_DATE_ASKED = (
    Pair("For what day was the delivery of {item} promised?", "{item}原定什么时候到？"),
    Pair("Which delivery day were we given for {item}?", "商家说{item}哪天送？"),
)
ORDER_NOW_ASKED = (
    Pair("Which number is valid for {item} by now?", "{item}现在有效的单号是哪个？"),
    Pair("Under what reference do we track {item} in the end?", "{item}最后是用哪个号查件的？"),
)
VISIT_TOLD = (
    Pair("{item}: fixed for {date}, {time}.", "{item}约好了，{date}{time}。"),
    Pair("Put this into the calendar please, {item}, {date} at {time}.", "麻烦记到日历上：{item}，{date}{time}。"),
    Pair("We finally got a slot for {item}. It's {date}, {time} sharp.", "{item}总算排上了，{date}{time}，准点。"),
    Pair(
        "About {item}: they offered {date} at {time} and I said yes.",
        "{item}那边给的时间是{date}{time}，我答应了。",
    ),
)
VISIT_MOVED = (
    Pair("{item} has been moved. The new time is {date}, {time}.", "{item}改期了，新的时间是{date}{time}。"),
    Pair("Something came up with {item}, now it's {date} at {time} instead.", "{item}有变动，换成{date}{time}。"),
)
VISIT_WISHED = (
    Pair("We should arrange {item} some day. I haven't called anybody.", "哪天得约一下{item}，我还没联系。"),
    Pair("{item}? No date yet, they don't pick up the phone.", "{item}？还没定日子，那边电话不接。"),
    Pair("Remind me of {item}, I keep putting it off.", "记得提醒我{item}的事，我一拖再拖。"),
)
VISIT_DAY_ASKED = (
    Pair("On which day is this in the calendar now: {item}?", "日历上{item}现在是哪天？"),
    Pair("What date stands for {item} at present?", "{item}目前定的是几月几号？"),
)
VISIT_TIME_ASKED = (
    Pair("At what time of day is this fixed: {item}?", "{item}约的是几点？"),
    Pair("Which hour was agreed for {item}?", "{item}定在几点钟？"),
)
DAY_ASKED = (
    Pair("What was the date of {a}?", "{a}是哪一天的事？"),
    Pair("On which day did this happen: {a}?", "{a}发生在几月几号？"),
)
FIRST_ASKED = (
    Pair("Which came first, {a} or {b}?", "{a}和{b}，哪件事在前？"),
    Pair("What happened earlier: {a}, or {b}?", "{a}、{b}，先发生的是哪个？"),
    Pair("Of these two, which was there before the other: {a}, {b}?", "下面两件事谁更早：{a}，{b}？"),
)
LAST_ASKED = (
    Pair("Which of these happened last: {a}, {b}, {c} or {d}?", "{a}、{b}、{c}、{d}，最后发生的是哪件？"),
    Pair(
        "Looking back at {a}, {b}, {c} and {d}: which was the most recent?",
        "回头看{a}、{b}、{c}、{d}，离现在最近的是哪一件？",
    ),
)
SEQUENCE_ASKED = (
    Pair("In which order did these happen: {a}, {b}, {c}?", "{a}、{b}、{c}，这几件事先后顺序是怎样的？"),
    Pair("Put into the order of time: {a}; {b}; {c}.", "请按时间先后排一下：{a}；{b}；{c}。"),
    Pair("Tell me {a}, {b} and {c} from the first to the last.", "从最早到最晚，{a}、{b}和{c}该怎么排？"),
)
SIDE_ASKED = (
    Pair("Did {a} come before or after {b}?", "{a}是在{b}之前还是之后？"),
    Pair("Seen from {b}, was {a} earlier or later, before or after?", "以{b}为准，{a}算之前还是之后？"),
)
BETWEEN_ASKED = (
    Pair("Which of these falls between {a} and {e}: {b}, {c} or {d}?", "{b}、{c}、{d}，哪一件发生在{a}和{e}之间？"),
    Pair(
        "After {a} and before {e}, which of the following took place: {b}, {c}, {d}?",
        "在{a}之后、{e}之前的是下面哪件：{b}、{c}、{d}？",
    ),
)
DAYS_ASKED = (
    Pair("How many days lie between {a} and {b}?", "{a}和{b}相隔多少天？"),
    Pair("How long, in days, was it from {a} to {b}?", "从{a}到{b}过了几天？"),
)
HAPPENED_ASKED = (
    Pair("Which notable thing happened on {date}?", "{date}那天发生了什么大事？"),
    Pair("What was it that we have to remember {date} for?", "{date}是什么特别的日子？"),
)
SOONER_ASKED = (
    Pair("Which is sooner by the calendar, {a} or {b}?", "按现在的日历，{a}和{b}哪个在前？"),
    Pair("Of {a} and {b}, which one comes first as things stand?", "照目前的安排，{a}、{b}，哪个先？"),
)
BEFORE = Pair(" before {a}", "在{a}之前")
AFTER = Pair(" after {a}", "在{a}之后")
SIDES = {"before": Pair("before", "之前"), "after": Pair("after", "之后")}


def day_text(day: dt.date) -> Pair:
    return Pair(f"{day.day} {MONTHS[day.month - 1]}", f"{day.month}月{day.day}日")


def month_text(month: int) -> Pair:
    return Pair(f" in {MONTHS[month - 1]}", f"在{MONTHS_ZH[month - 1]}月份")


def same(text: str) -> Pair:
    return Pair(text, text)
