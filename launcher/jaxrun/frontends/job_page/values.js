
"use strict";
// Elements, and values in words. All text comes as text: nothing of the job is read as HTML.
const ids = name => document.getElementById(name);

function make(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${Number(count.toPrecision(3))} ${units[unit]}`;
}

function seconds(value) {
  const size = Math.abs(value);
  if (size < 0.9995e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 0.9995) return `${(value * 1e3).toFixed(size < 0.00995 ? 2 : size < 0.0995 ? 1 : 0)} ms`;
  if (size < 119.95) return `${value.toFixed(size < 9.995 ? 2 : 1)} s`;
  const whole = Math.round(value);
  return whole < 3600 ? `${Math.floor(whole / 60)} min ${whole % 60} s`
                      : `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
}

const percent = share => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
const figure = value => `${Number(value.toPrecision(3))}`;
const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

function ranges(numbers) {
  const parts = [];
  for (const number of numbers) {
    const last = parts[parts.length - 1];
    if (last && number === last[1] + 1) last[1] = number; else parts.push([number, number]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
}

const rankNames = numbers => `${numbers.length === 1 ? "rank" : "ranks"} ${ranges(numbers)}`;

// Prepares a canvas for the screen's pixels; returns its pen and its size in CSS pixels.
function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return {pen, width, height};
}
