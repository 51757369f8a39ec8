// The page for people in a real browser: node page.mjs URL BROWSER. Ends with 0 where all holds.
import assert from "node:assert/strict";
import puppeteer from "puppeteer-core";

const [url, browserPath] = process.argv.slice(2);
const browser = await puppeteer.launch({
  executablePath: browserPath,
  headless: "shell",
  args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
});
try {
  const page = await browser.newPage();
  const complaints = [];
  const elsewhere = [];
  page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(error.message));
  page.on("request", (request) => request.url().startsWith(url) || elsewhere.push(request.url()));
  await page.setViewport({ width: 390, height: 800 });
  await page.goto(`${url}/`);
  await page.waitForFunction(() => document.querySelector("#model").value === "tale");

  async function turn(text, place) {
    await page.type("#text", text);
    await page.keyboard.press("Enter");
    await page.waitForFunction(
      (n) => document.querySelectorAll("article.assistant small")[n]?.textContent, {}, place,
    );
    return page.evaluate((n) => {
      const box = document.querySelectorAll("article.assistant")[n];
      return [box.querySelector("span").textContent, box.querySelector("small").textContent];
    }, place);
  }

  const [first, note] = await turn("Tell me of Mira.", 0);
  assert.ok(first.trim().length > 0, "an answer");
  assert.match(note, /^\d+ of \d+ tokens reused, \d+ generated, [\d.]+ tokens\/s$/);
  const [, again] = await turn("And then?", 1);
  const [reused, prompt] = again.match(/\d+/g).map(Number);
  assert.ok(reused > 0 && reused < prompt, `the second turn is warm: ${again}`);
  await page.waitForFunction(() => /\d+ running, \d+ waiting, \d+ of \d+ cells/.test(
    document.querySelector("#stats").textContent,
  ));
  let told = "";
  for (let place = 2; place < 12 && !told.includes("left out"); place++) {
    [, told] = await turn("And then, when the sun had gone down behind the hill?", place);
  }
  assert.match(told, /, \d+ old messages left out$/, "a full window goes on");
  const wide = await page.evaluate(() => document.documentElement.scrollWidth);
  assert.ok(wide <= 390, `nothing sticks out of a telephone's screen: ${wide}`);
  await page.setViewport({ width: 1400, height: 900 });
  const [all, read] = await page.evaluate(() => [
    document.documentElement.scrollWidth,
    document.querySelector("article.assistant").getBoundingClientRect().width,
  ]);
  assert.ok(all <= 1400, `nothing sticks out of a desk's screen: ${all}`);
  assert.ok(read > 300 && read < 1100, `lines on a wide screen can be read: ${read}`);
  await page.click("#new");
  assert.equal(await page.$$eval("article", (boxes) => boxes.length), 0);
  assert.deepEqual(complaints.filter((text) => !text.includes("favicon")), []);
  assert.deepEqual(elsewhere, []);
  console.log("ok");
} finally {
  await browser.close();
}
