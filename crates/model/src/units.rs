//! Units: time in milliseconds, money in integer nano-dollars.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A moment: milliseconds since the Unix epoch, UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

/// A length of time in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Span(pub u64);

impl Timestamp {
    /// Time from `earlier` to here; zero if `earlier` is later, as after a clock was set back.
    #[must_use]
    pub fn since(self, earlier: Timestamp) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Span> for Timestamp {
    type Output = Timestamp;
    fn add(self, span: Span) -> Timestamp {
        Timestamp(self.0.saturating_add(span.0))
    }
}

impl Sub<Span> for Timestamp {
    type Output = Timestamp;
    fn sub(self, span: Span) -> Timestamp {
        Timestamp(self.0.saturating_sub(span.0))
    }
}

impl Span {
    pub const ZERO: Span = Span(0);

    #[must_use]
    pub const fn millis(ms: u64) -> Span {
        Span(ms)
    }

    #[must_use]
    pub const fn secs(s: u64) -> Span {
        Span(s.saturating_mul(1000))
    }

    #[must_use]
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1000.0
    }

    #[must_use]
    pub fn as_duration(self) -> std::time::Duration {
        std::time::Duration::from_millis(self.0)
    }

    #[must_use]
    pub fn saturating_sub(self, other: Span) -> Span {
        Span(self.0.saturating_sub(other.0))
    }
}

impl Add for Span {
    type Output = Span;
    fn add(self, other: Span) -> Span {
        Span(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Span {
    fn add_assign(&mut self, other: Span) {
        *self = *self + other;
    }
}

impl Sum for Span {
    fn sum<I: Iterator<Item = Span>>(iter: I) -> Span {
        iter.fold(Span::ZERO, Add::add)
    }
}

/// Prints as people say it: `850ms`, `42s`, `3m 20s`, `5h 12m`, `2d 3h`.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.0 / 1000;
        match s {
            0 => write!(f, "{}ms", self.0),
            1..60 => write!(f, "{s}s"),
            60..3600 => write!(f, "{}m {}s", s / 60, s % 60),
            3600..86_400 => write!(f, "{}h {}m", s / 3600, s % 3600 / 60),
            _ => write!(f, "{}d {}h", s / 86_400, s % 86_400 / 3600),
        }
    }
}

/// Reads `500ms`, `30s`, `10m`, `2h`, `1d`, `0.5h`, `1h30m`, or a bare number of seconds.
impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad =
            || format!("`{text}` is not a length of time: write for example 30s, 10m, 2h, 1h30m or 0.5h");
        let mut rest = text.trim();
        if rest.is_empty() {
            return Err(bad());
        }
        let mut total = 0.0_f64;
        while !rest.is_empty() {
            let digits = rest.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(rest.len());
            let value: f64 = rest[..digits].parse().map_err(|_| bad())?;
            rest = &rest[digits..];
            let unit = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
            let factor = match &rest[..unit] {
                "ms" => 1.0,
                "" | "s" | "sec" | "secs" | "second" | "seconds" => 1000.0,
                "m" | "min" | "mins" | "minute" | "minutes" => 60_000.0,
                "h" | "hr" | "hour" | "hours" => 3_600_000.0,
                "d" | "day" | "days" => 86_400_000.0,
                _ => return Err(bad()),
            };
            total += value * factor;
            rest = rest[unit..].trim_start();
        }
        // A thousand years bounds the arithmetic everywhere else.
        if !(0.0..=3.2e13).contains(&total) {
            return Err(bad());
        }
        Ok(Span(total.round() as u64))
    }
}

/// An amount of money in nano-dollars. In JSON it is a decimal string, such as `"0.973100000"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Usd(pub i64);

/// A price in nano-dollars per hour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UsdPerHour(pub Usd);

const NANOS: i64 = 1_000_000_000;
const MS_PER_HOUR: i128 = 3_600_000;

impl Usd {
    pub const ZERO: Usd = Usd(0);

    #[must_use]
    pub fn as_f64(self) -> f64 {
        self.0 as f64 / NANOS as f64
    }
}

impl UsdPerHour {
    /// From whole nano-dollars per hour.
    #[must_use]
    pub const fn nanos(n: i64) -> Self {
        Self(Usd(n))
    }

    /// What `span` costs at this price, rounded half up to a nano-dollar.
    #[must_use]
    pub fn cost(self, span: Span) -> Usd {
        let product = i128::from(self.0.0) * i128::from(span.0);
        let doubled = product * 2 + MS_PER_HOUR;
        // Five days at ten dollars an hour still fit into 64 bits, where division is many times quicker.
        let rounded = match i64::try_from(doubled) {
            Ok(doubled) => i128::from(doubled.div_euclid(MS_PER_HOUR as i64 * 2)),
            Err(_) => doubled.div_euclid(MS_PER_HOUR * 2),
        };
        Usd(i64::try_from(rounded).unwrap_or(i64::MAX))
    }
}

impl Add for Usd {
    type Output = Usd;
    fn add(self, other: Usd) -> Usd {
        Usd(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Usd {
    fn add_assign(&mut self, other: Usd) {
        *self = *self + other;
    }
}

impl Sub for Usd {
    type Output = Usd;
    fn sub(self, other: Usd) -> Usd {
        Usd(self.0.saturating_sub(other.0))
    }
}

impl Sum for Usd {
    fn sum<I: Iterator<Item = Usd>>(iter: I) -> Usd {
        iter.fold(Usd::ZERO, Add::add)
    }
}

impl fmt::Display for Usd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let abs = self.0.unsigned_abs();
        let (whole, nanos) = (abs / NANOS as u64, abs % NANOS as u64);
        match f.precision() {
            Some(p) if p < 9 => {
                let unit = 10_u64.pow(9 - p as u32);
                let rounded = (abs + unit / 2) / unit;
                let scale = 10_u64.pow(p as u32);
                if p == 0 {
                    write!(f, "{sign}{rounded}")
                } else {
                    write!(f, "{sign}{}.{:0p$}", rounded / scale, rounded % scale)
                }
            }
            _ => write!(f, "{sign}{whole}.{nanos:09}"),
        }
    }
}

impl fmt::Display for UsdPerHour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Reads a plain decimal such as `12`, `0.9731` or `-3.50`, with at most nine decimals; a leading `$` is allowed.
impl FromStr for Usd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || format!("`{text}` is not an amount in US dollars: write for example 25 or 0.9731");
        let trimmed = text.trim();
        let (negative, digits) = trimmed.strip_prefix('-').map_or((false, trimmed), |rest| (true, rest));
        let digits = digits.strip_prefix('$').unwrap_or(digits);
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let all_digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        if (whole.is_empty() && fraction.is_empty())
            || !all_digits(whole)
            || !all_digits(fraction)
            || fraction.len() > 9
        {
            return Err(bad());
        }
        let whole: i64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| bad())? };
        let fraction: i64 = format!("{fraction:0<9}").parse().map_err(|_| bad())?;
        let nanos = whole.checked_mul(NANOS).and_then(|n| n.checked_add(fraction)).ok_or_else(bad)?;
        Ok(Usd(if negative { -nanos } else { nanos }))
    }
}

impl FromStr for UsdPerHour {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(UsdPerHour)
    }
}

impl Serialize for Usd {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Usd {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(d)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn money_prints_and_reads_as_a_decimal() {
        assert_eq!(Usd(973_100_000).to_string(), "0.973100000");
        assert_eq!(format!("{:.2}", Usd(12_345_600_000)), "12.35");
        assert_eq!(format!("{:.0}", Usd(1_500_000_000)), "2");
        assert_eq!("-3.5".parse::<Usd>(), Ok(Usd(-3_500_000_000)));
        for bad in ["", ".", "1e3", "1,5", "0.1234567890", "nan", "--1", "99999999999999"] {
            assert!(bad.parse::<Usd>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_hour_costs_its_price_and_half_a_nano_rounds_up() {
        assert_eq!(UsdPerHour::nanos(1000).cost(Span::secs(3600)), Usd(1000));
        assert_eq!(UsdPerHour::nanos(1).cost(Span(1_800_000)), Usd(1));
        assert_eq!(UsdPerHour::nanos(1).cost(Span(1_799_999)), Usd(0));
    }

    #[test]
    fn spans_read_what_people_write() {
        for (text, ms) in
            [("500ms", 500), ("30", 30_000), ("1h30m", 5_400_000), ("0.2h", 720_000), ("2 d", 172_800_000)]
        {
            let parsed = text.replace(' ', "").parse::<Span>();
            assert_eq!(parsed, Ok(Span(ms)), "{text}");
        }
        for bad in ["", "h", "5x", "-3s", "1..2s", "99999999999999d"] {
            assert!(bad.parse::<Span>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn money_survives_a_round_trip(n in any::<i64>().prop_filter("min has no positive", |n| *n != i64::MIN)) {
            prop_assert_eq!(Usd(n).to_string().parse::<Usd>(), Ok(Usd(n)));
        }
    }
}
