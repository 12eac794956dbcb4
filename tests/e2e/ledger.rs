//! Computes a bill again from its segments, as anyone may who has them.

use std::collections::BTreeMap;

use serde_json::Value;

/// Nano-dollars of a decimal string of dollars.
pub fn nanos(value: &Value) -> i64 {
    let text = value.as_str().unwrap_or_else(|| panic!("{value} is not a decimal string"));
    let (sign, digits) = text.strip_prefix('-').map_or((1, text), |rest| (-1, rest));
    let (whole, fraction) = digits.split_once('.').unwrap();
    assert_eq!(fraction.len(), 9, "{text} has not nine decimals");
    sign * (whole.parse::<i64>().unwrap() * 1_000_000_000 + fraction.parse::<i64>().unwrap())
}

/// The sum of the closed segments `amount_usd`, each of which must be price × time to the nano-dollar.
pub fn bill(segments: &[Value]) -> i64 {
    segments.iter().map(amount).sum()
}

/// INV-09: the segments of a node neither overlap nor leave gaps, and spot is never dearer than on demand.
pub fn assert_contiguous(segments: &[Value]) {
    let mut nodes: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
    for segment in segments {
        let (start, end) = span(segment);
        nodes.entry(segment["node"].as_u64().unwrap()).or_default().push((start, end));
        if segment["market"] == "spot" {
            assert!(nanos(&segment["price_usd_h"]) < nanos(&segment["on_demand_usd_h"]), "{segment:#}");
        }
    }
    for (node, mut spans) in nodes {
        spans.sort_unstable();
        for pair in spans.windows(2) {
            assert_eq!(pair[0].1, pair[1].0, "a gap or an overlap on node {node}: {spans:?}");
        }
    }
}

fn amount(segment: &Value) -> i64 {
    const MS_PER_HOUR: i128 = 3_600_000;
    let (start, end) = span(segment);
    assert!(end > start, "{segment:#}");
    let exact = i128::from(nanos(&segment["price_usd_h"])) * i128::from(end - start);
    let told = nanos(&segment["amount_usd"]);
    let off = (exact - i128::from(told) * MS_PER_HOUR).abs();
    // Rounded to a whole nano-dollar, whichever way.
    assert!(off <= MS_PER_HOUR, "price × time is not the amount: {segment:#}");
    told
}

fn span(segment: &Value) -> (u64, u64) {
    (segment["start_ms"].as_u64().unwrap(), segment["end_ms"].as_u64().unwrap())
}
